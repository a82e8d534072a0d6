"""An agent that answers arithmetic questions with a calculator: `agent.py QUESTION`.

It knows nothing of training. It speaks the OpenAI chat interface to whatever `OPENAI_BASE_URL` points at,
runs the calculator when the model asks for it, and ends when the model answers in words.
Standard library only, and little of that: the process is started once per question.
"""

import json
import os
import sys

from calculator import InvalidExpression, calculate
from http_json import HttpError, post_json

SYSTEM = "Answer with a number. Use the calculator."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression on whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for instance (12+34)*5"}},
                "required": ["expression"],
            },
        },
    }
]
MAX_TURNS = 4
MAX_TOKENS = 32  # of one answer; a call takes about 15


class Agent:
    def __init__(self, base_url, key, model):
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.key = key
        self.model = model

    def run(self, question):
        """The model's answer to `question`, or None when it never gave one."""
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for _ in range(MAX_TURNS):
            answer = self.step()
            if answer is not None:
                return answer
        return None

    def step(self):
        """One call of the model and of the tools it asks for. Returns its answer once it asks for none."""
        message = self.query()
        self.messages.append(message)
        if not message.get("tool_calls"):
            return message.get("content") or ""
        for call in message["tool_calls"]:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": execute(call["function"])})
        return None

    def query(self):
        body = {"model": self.model, "messages": self.messages, "tools": TOOLS, "max_tokens": MAX_TOKENS}
        return post_json(self.url, self.key, body)["choices"][0]["message"]


def execute(function):
    """What the tool says to the model: a number, or what was wrong."""
    try:
        if function["name"] != "calculator":
            return "error: unknown tool"
        return calculate(json.loads(function["arguments"])["expression"])
    except (InvalidExpression, ValueError, KeyError, TypeError):
        return "error: invalid expression"


def answer_line(answer):
    """The last line of standard output, which is what an evaluator reads: one line whatever the model wrote."""
    return "ANSWER: " + " ".join((answer or "").split())


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: agent.py QUESTION   (with OPENAI_BASE_URL and OPENAI_API_KEY in the environment)")
    base_url = os.environ.get("OPENAI_BASE_URL")
    if not base_url:
        sys.exit("agent.py: OPENAI_BASE_URL is not set: the model's address, for instance http://127.0.0.1:8000/v1")
    agent = Agent(base_url, os.environ.get("OPENAI_API_KEY", ""), os.environ.get("OPENAI_MODEL", "policy"))
    try:
        print(answer_line(agent.run(sys.argv[1])))
    except HttpError as error:
        sys.exit(f"agent.py: {error}")


if __name__ == "__main__":
    main()
