"""The agent's tool: exact integer arithmetic, and nothing else that Python can do."""

# What `ast.parse` passes to `compile`; importing `ast` for it would cost every agent 4 ms of start-up.
ONLY_AST = 0x400
LONGEST_EXPRESSION = 200


class InvalidExpression(Exception):
    """The text is not arithmetic on whole numbers with + - * and brackets."""


def calculate(expression):
    """The value of an arithmetic expression as text, for instance `"(12+34)*5"` -> `"230"`."""
    if not isinstance(expression, str) or len(expression) > LONGEST_EXPRESSION:
        raise InvalidExpression
    try:
        tree = compile(expression, "<expression>", "eval", ONLY_AST)
        return str(value(tree.body))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise InvalidExpression from error


def value(node):
    kind = type(node).__name__
    if kind == "Constant" and type(node.value) is int:
        return node.value
    if kind == "UnaryOp" and type(node.op).__name__ == "USub":
        return -value(node.operand)
    if kind == "BinOp":
        operator = type(node.op).__name__
        if operator == "Add":
            return value(node.left) + value(node.right)
        if operator == "Sub":
            return value(node.left) - value(node.right)
        if operator == "Mult":
            return value(node.left) * value(node.right)
    raise InvalidExpression
