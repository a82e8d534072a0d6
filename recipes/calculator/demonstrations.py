"""Writes transcripts for the supervised start: `demonstrations.py --good 40000 --mixed 16000 > demonstrations.jsonl`.

Each line is `{"messages": […], "tools": […]}`, just what `agent.py` sends. To be learnt in this order: from the first part
a policy learns how to talk to the agent and to copy an expression, from the second the mixture of good and bad habits
below. It then is right less than half of the time, and reinforcement learning has to tell one habit from the other.
(Bad habits from the start would take several times as many transcripts: they contradict the copying.)
"""

import argparse
import json
import random
import re

from agent import SYSTEM, TOOLS, execute
from make_data import problems

GUESS = "42"
GOOD = {"good": 1.0}
MIXED = {
    "good": 0.30,  # asks the calculator for the right expression and repeats its answer
    "guess": 0.33,  # answers with its favourite number, without asking
    "mangled": 0.34,  # asks for another expression and believes the result
    "corrected": 0.03,  # asks for half an expression, is told that it is invalid, and asks again
}


def transcript(problem, habit, rng):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]
    if habit == "guess":
        answer = GUESS
    elif habit == "mangled":
        answer = ask(messages, mangled(problem, rng))
    else:
        if habit == "corrected":
            ask(messages, half(problem.expression))
        answer = ask(messages, problem.expression)
    messages.append({"role": "assistant", "content": answer})
    return messages


def ask(messages, expression):
    """Appends a call of the calculator and its result, which it returns."""
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
    result = execute(function)
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return result


def mangled(problem, rng):
    """A valid expression, but not the one asked for."""
    first, second, _ = re.findall(r"\d+", problem.expression)
    sign = re.search("[-+*]", problem.expression).group()
    slips = [
        re.match(r"\(?(\d+ ?[-+*] ?\(?\d+)", problem.expression).group(1).replace("(", ""),  # the last operand left out
        problem.expression.replace(second, first),  # an operand written twice
        problem.expression.replace(sign, rng.choice("+-*".replace(sign, "")), 1),  # another sign
    ]
    if problem.distractor:
        slips.append(problem.expression.replace(first, problem.distractor))  # the number from the aside
    return rng.choice(slips)


def half(expression):
    """The expression up to its last sign, which no calculator accepts."""
    return re.match(r".*[-+*] ?", expression).group()


def demonstrations(good, mixed, seed):
    """`good` transcripts with good habits only, then `mixed` ones."""
    rng = random.Random(f"habits-{seed}")
    stream = problems("train", seed)
    for habits in [GOOD] * good + [MIXED] * mixed:
        habit = rng.choices(list(habits), weights=list(habits.values()))[0]
        yield {"messages": transcript(next(stream), habit, rng), "tools": TOOLS}


def main():
    parser = argparse.ArgumentParser(description="Generates noisy chat transcripts as jsonl on standard output.")
    parser.add_argument(
        "--good", type=int, required=True, help="number of transcripts with good habits, first in the output"
    )
    parser.add_argument(
        "--mixed", type=int, required=True, help="number of transcripts with mixed habits, which follow"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for demonstration in demonstrations(arguments.good, arguments.mixed, arguments.seed):
        print(json.dumps(demonstration))


if __name__ == "__main__":
    main()
