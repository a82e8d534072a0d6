"""`generateContent` through the `google-genai` package: `google_genai.py [stream]`."""

import sys

from google import genai
from google.genai import types

import task

client = genai.Client()
tool = types.Tool(function_declarations=[types.FunctionDeclaration(name=task.NAME, description=task.DESCRIPTION, parameters_json_schema=task.SCHEMA)])
config = types.GenerateContentConfig(system_instruction=task.SYSTEM, tools=[tool], max_output_tokens=1000)
contents = [types.Content(role="user", parts=[types.Part(text=task.QUESTION)])]


def ask():
    if "stream" not in sys.argv:
        return client.models.generate_content(model="gemini-2.5-flash", contents=contents, config=config).candidates[0].content
    parts = []
    for chunk in client.models.generate_content_stream(model="gemini-2.5-flash", contents=contents, config=config):
        parts += chunk.candidates[0].content.parts
    return types.Content(role="model", parts=parts)


assert client.models.count_tokens(model="gemini-2.5-flash", contents=contents).total_tokens > 10
while True:
    content = ask()
    contents.append(content)
    calls = [part.function_call for part in content.parts if part.function_call]
    if not calls:
        break
    parts = [types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"result": task.multiply(**call.args)})) for call in calls]
    contents.append(types.Content(role="user", parts=parts))
task.answer("".join(part.text or "" for part in content.parts))
