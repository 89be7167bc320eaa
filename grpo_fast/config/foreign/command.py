"""The command that starts a run, in a shell script: `key=value` overrides and `--flag value` pairs."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from grpo_fast.config.section import short

# Quoted text stays; heredocs, comments and a backslash before a line's end go; spaces leave $(...).
_PIECES = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|<<-?\s*['"]?(\w+).*?^\s*\1$|\\\n|(?<!\S)\#[^\n]*|[\n;]|\$\(\([^\n]*?\)\)|\$\([^()\n]*\)""",
    re.DOTALL | re.MULTILINE,
)
_OVERRIDE = re.compile(r"[+~]*([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"(--[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_END = re.compile(r"[;&|()<>]+|\d?>.*|\$@|\$\{\w+\[@\]\}")  # of a flag's values
_PROGRAM = re.compile(r".*\.py|-[A-Za-z]")  # that a launcher starts, behind its own flags
_REFERENCE = re.compile(r"\$\(\(([^$]*)\)\)|\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def read_command(text: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Overrides and flags by name, the script's variables filled in; one that it leaves open stays `${NAME}`.

    Args:
        text: the script, or the command alone.
        parse: a value's text -> the value.

    Raises:
        ValueError: a quote without its end, two commands, or none.
    """
    given: list[tuple[str, list[str], int]] = []  # a name, its words, which of the commands
    variables: dict[str, str | None] = {"HOME": "~"}
    open_flag, command = False, 0
    for token in shlex.split(_PIECES.sub(_tidy, text)):
        token = _filled_in(token, variables)
        flag, override = _FLAG.fullmatch(token), _OVERRIDE.fullmatch(token)
        if match := flag or override:
            given.append((match[1], [] if match[2] is None else [match[2]], command))
            open_flag = flag is not None
        elif _END.fullmatch(token):
            open_flag, command = False, command + (token == ";")
        elif open_flag and given[-1][1] and _PROGRAM.fullmatch(token):
            open_flag = False
        elif open_flag:
            given[-1][1].append(token.rstrip(","))
        elif match := _VARIABLE.fullmatch(token):
            name, value = match.groups()
            # One that is set twice, or from itself, depends on the way that the script takes.
            is_known = variables.get(name, value) == value and f"${{{name}}}" not in value
            variables[name] = value if is_known else None
    # Beside overrides, flags are those of launchers and other programs, but for hydra's own.
    overrides = any(not name.startswith("--") for name, _, _ in given)
    found: dict[str, Any] = {}
    source: dict[str, int] = {}
    for name, words, command in given:
        if overrides and name.startswith("--") and not name.startswith("--config"):
            continue
        key = name.removeprefix("--").replace("-", "_")
        values = [parse(word) for word in words]
        value = values[0] if len(values) == 1 else values or True
        if found.get(key, value) != value and source[key] != command:
            raise ValueError(f"{name} is {short(found[key])}, then {short(value)}; keep one command alone")
        found[key], source[key] = value, command
    if not found:
        raise ValueError("it holds no command with `key=value` overrides or `--flag value` pairs")
    return found


def _tidy(match: re.Match[str]) -> str:
    piece = match[0]
    if piece[0] in "'\"":
        return piece
    if piece.startswith("$(("):
        return "".join(piece.split())
    if piece.startswith("$("):  # what another command prints
        return f"${{{''.join(piece[2:-1].split())}}}"
    return " ; " if piece in "\n;" else " "


def _filled_in(token: str, variables: Mapping[str, str | None]) -> str:
    def value(match: re.Match[str]) -> str:
        calculation, braced, default, bare = match.groups()
        if calculation is not None:
            return _calculated(calculation, variables) or match[0]
        known = variables.get(braced or bare, default)
        return f"${{{braced or bare}}}" if known is None else known

    before = ""
    while token != before:
        before, token = token, _REFERENCE.sub(value, token)
    return token


def _calculated(text: str, variables: Mapping[str, str | None]) -> str | None:
    """Whole-number arithmetic; None where something in it is not known."""

    def number(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](number(node.left), number(node.right))
        return int(variables[node.id] or "" if isinstance(node, ast.Name) else ast.literal_eval(node))

    try:
        return str(number(ast.parse(text.replace("/", "//"), mode="eval").body))
    except (SyntaxError, KeyError, ValueError, TypeError, ZeroDivisionError):
        return None
