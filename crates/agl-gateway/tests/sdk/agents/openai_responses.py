"""Responses through the `openai` package: `openai_responses.py [stream]`."""

import json
import sys

from openai import OpenAI

import task

client = OpenAI()
tools = [{"type": "function", "name": task.NAME, "description": task.DESCRIPTION, "parameters": task.SCHEMA, "strict": False}]
items = [{"role": "user", "content": task.QUESTION}]


def ask():
    request = {"model": "gpt-4o", "instructions": task.SYSTEM, "input": items, "tools": tools, "store": False}
    if "stream" not in sys.argv:
        return client.responses.create(**request)
    with client.responses.stream(**request) as stream:
        numbers = [event.sequence_number for event in stream]
        assert numbers == list(range(len(numbers))), numbers
        return stream.get_final_response()


while True:
    response = ask()
    assert response.status == "completed" and response.usage.output_tokens > 0, response
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": task.multiply(**json.loads(call.arguments))})
task.answer(response.output_text)
