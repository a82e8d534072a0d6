"""The agent of `agent.py` on the `openai` package, which reads OPENAI_BASE_URL and OPENAI_API_KEY by itself."""

import os
import sys

from agent import MAX_TOKENS, MAX_TURNS, SYSTEM, TOOLS, answer_line, execute
from openai import OpenAI, OpenAIError


def run(client, model, question):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            function = {"name": call.function.name, "arguments": call.function.arguments}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": execute(function)})
    return None


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: agent_openai.py QUESTION   (with OPENAI_BASE_URL and OPENAI_API_KEY in the environment)")
    try:
        print(answer_line(run(OpenAI(), os.environ.get("OPENAI_MODEL", "policy"), sys.argv[1])))
    except OpenAIError as error:
        sys.exit(f"agent_openai.py: {error}")


if __name__ == "__main__":
    main()
