"""Generates the recipe's questions: `make_data.py --split train --n 2000 --seed 1 > train.jsonl`.

A question hides an expression of three operands in a few words, with or without brackets, and often beside a sentence
whose number has nothing to do with it. Every expression holds a product of two-digit numbers, so that a small model
cannot guess the result: it has to use its calculator.

An expression belongs to one split for ever, by its checksum: whatever the seeds, a validation question never asks
for an expression that training has seen.
"""

import argparse
import json
import random
import zlib
from dataclasses import dataclass

from calculator import calculate

SHAPES = [
    "a * b + c",
    "a * b - c",
    "a + b * c",
    "a - b * c",
    "(a + b) * c",
    "(a - b) * c",
    "a * (b + c)",
    "a * (b - c)",
]
SPLITS = {"train": range(2, 16), "val": range(0, 1), "fresh": range(1, 2)}  # sixteenths of all expressions

ASKS = ["What is {}?", "Compute {}.", "How much is {}?", "Please work out {}.", "I need the value of {}.", "Find {}."]
DISTRACTORS = [
    "Tom is {} years old.",
    "The bus number is {}.",
    "Ann lives at number {}.",
    "There are {} chairs in the room.",
    "My locker is {}.",
    "The train leaves at {}.",
    "I read {} pages today.",
    "We drove {} miles.",
]
WITH_DISTRACTOR = 0.6


@dataclass
class Problem:
    question: str
    expression: str  # as the question spells it
    answer: int
    distractor: str | None  # the number that has nothing to do with it


def split_of(expression):
    part = zlib.crc32(expression.encode()) % 16
    return next(name for name, parts in SPLITS.items() if part in parts)


def problems(split, seed):
    """An endless, repeatable stream of problems of one split."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        expression = draw_expression(rng)
        answer = int(calculate(expression))
        # A small result could be met by a guess that names a number of the question.
        if split_of(expression) == split and abs(answer) >= 100:
            yield put_into_words(expression, answer, rng)


def draw_expression(rng):
    operands = {name: str(rng.randint(11, 99)) for name in "abc"}
    return "".join(operands.get(sign, sign) for sign in rng.choice(SHAPES))


def put_into_words(expression, answer, rng):
    question, distractor = rng.choice(ASKS).format(expression), None
    if rng.random() < WITH_DISTRACTOR:
        distractor = str(rng.randint(11, 99))
        aside = rng.choice(DISTRACTORS).format(distractor)
        question = f"{aside} {question}" if rng.random() < 0.5 else f"{question} {aside}"
    return Problem(question, expression, answer, distractor)


def rows(split, seed, n):
    stream = problems(split, seed)
    for index in range(n):
        problem = next(stream)
        yield {"data_id": f"{split}-{seed}-{index}", "question": problem.question, "answer": problem.answer}


def main():
    parser = argparse.ArgumentParser(description="Generates arithmetic questions as jsonl on standard output.")
    parser.add_argument("--split", choices=sorted(SPLITS), required=True)
    parser.add_argument("--n", type=int, required=True, help="number of questions")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for row in rows(arguments.split, arguments.seed, arguments.n):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
