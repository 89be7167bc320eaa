"""A calculator as an environment: the same file trains here (`rollout.environment`) and in TRL
(`GRPOTrainer(environment_factory=Calculator)`)."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LARGEST = 10**12


class Calculator:
    """Whole numbers and + - *."""

    def reset(self, **row: object) -> str | None:
        """Begin a completion, to whose prompt nothing is to be added."""
        self.results: list[int] = []
        return None

    def calculate(self, expression: str) -> str:
        """Compute an expression.

        Args:
            expression: whole numbers with + - * and parentheses, such as 12 * 34
        """
        self.results.append(value_of(ast.parse(expression.strip(), mode="eval").body))
        return str(self.results[-1])


def used(environments: list[Calculator], **columns: object) -> list[float]:
    """A reward: 1 where the calculator has given a result."""
    return [float(bool(environment.results)) for environment in environments]


def value_of(node: ast.expr) -> int:
    """What a parsed expression gives; its text is the model's, so nothing of it is executed.

    Raises:
        ValueError: anything but whole numbers, + - * and parentheses, or a result beyond 10^12.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        value = OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -value_of(node.operand)
    else:
        raise ValueError("only whole numbers, + - * and parentheses can be computed")
    if abs(value) > LARGEST:
        raise ValueError("the result is too large")
    return value
