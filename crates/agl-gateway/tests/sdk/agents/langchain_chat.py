"""`langchain-openai`: `langchain_chat.py [stream]`."""

import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import task

model = ChatOpenAI(model="gpt-4o").bind_tools([tool(task.multiply)])
messages = [SystemMessage(task.SYSTEM), HumanMessage(task.QUESTION)]


def ask():
    if "stream" not in sys.argv:
        return model.invoke(messages)
    whole = None
    for chunk in model.stream(messages):
        whole = chunk if whole is None else whole + chunk
    return whole


while True:
    message = ask()
    messages.append(message)
    if not message.tool_calls:
        break
    messages += [ToolMessage(task.multiply(**call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
task.answer(message.text if isinstance(message.text, str) else message.text())
