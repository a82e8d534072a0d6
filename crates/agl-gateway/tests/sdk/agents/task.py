"""What the SDK agents have in common: a question, one tool, and what the model is scripted to do.

The model first calls `multiply` with 6 and 7 and then says the result, so that every agent makes two calls, the second of
which sends the first answer back. They print `ANSWER: …` for the test to read.
"""

QUESTION = "What is 6 times 7? Use the tool."
SYSTEM = "You multiply."
NAME = "multiply"
DESCRIPTION = "Multiplies two numbers."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def multiply(a: int, b: int) -> str:
    """Multiplies two numbers."""
    return str(a * b)


def answer(text):
    assert "42" in text, text
    print("ANSWER:", text)
