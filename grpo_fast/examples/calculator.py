"""A calculator as an environment, for `rollout.environment` and for TRL's `environment_factory`."""

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
    """Computes with whole numbers and + - *."""

    def reset(self, **row: object) -> str | None:
        """Begin a completion; None adds nothing to its prompt."""
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
    """Reward completions that got a result from the calculator."""
    return [float(bool(environment.results)) for environment in environments]


def value_of(node: ast.expr) -> int:
    """Compute a parsed expression without executing the model's text; raise ValueError for anything else."""
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
