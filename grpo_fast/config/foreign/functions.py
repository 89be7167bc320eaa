"""Copy the functions that a run needs from a script, with what they refer to."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterator

from grpo_fast.config.foreign.syntax import Program
from grpo_fast.config.secrets import is_secret

# Calls that train, load what is trained, or read the command line.
_ENDS = ("Trainer", "get_peft_model", "parse_args", "parse_known_args", "parse_args_into_dataclasses")


class Functions:
    """A file of functions, constants, classes and imports of a script."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.policy: dict[int, str] = {}  # the path, by the id of a call that loads the policy
        self.problems: dict[str, str] = {}  # by name
        self._parts: dict[tuple[int, str], str] = {}  # by the line in the script
        self._names: set[str] = set()

    def text(self, script: str) -> str:
        """Return the file's text; nothing where the run needs no function."""
        blocks = [f'"""Functions of {script} for its rewards and data."""']
        blocks += ["from __future__ import annotations"] * ("annotations" in self.program.statements)
        for _, part in sorted(self._parts.items()):
            is_definition = re.search("^(async def|def|class) ", part, re.MULTILINE)
            blocks += ["\n", part, "\n"] if is_definition else [part]
        return "\n".join(blocks).rstrip() + "\n" if self._parts else ""

    def add(self, name: str, user: str = "") -> None:
        """Copy the statements that bind a name, and what they refer to."""
        statements = self.program.statements.get(name)
        if name in self._names or (statements is None and hasattr(builtins, name)) or name == "__name__":
            return
        self._names.add(name)
        if statements is None:
            self.problems[name] = f"the script does not define it outside of functions, and {user} uses it"
        for statement in statements or ():
            self._copy(name, statement, user)

    def define(self, name: str, text: str) -> str:
        """Append code with NAME for its name; return the unused name that it gets."""
        while name in self._names or name in self.program.statements:
            name += "_"
        self._names.add(name)
        self._keep(len(self.program.lines), text.replace("NAME", name, 1), name)
        return name

    def _copy(self, name: str, statement: ast.stmt, user: str) -> None:
        value, index = self.program.values.get(name), None
        match value:
            case ast.Subscript(value=made, slice=ast.Constant(value=part)):
                value, index = made, part
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        binds = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name | ast.Tuple)
        trains = id(value) in self.policy or any(ast.unparse(call.func).endswith(_ENDS) for call in calls)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            kept = [one for one in statement.names if (one.asname or one.name).partition(".")[0] == name]
            only: ast.stmt = ast.Import(kept)
            if isinstance(statement, ast.ImportFrom):
                only = ast.ImportFrom(statement.module, kept, statement.level)
            self._parts[statement.lineno, name] = ast.unparse(only)
        elif binds and id(value) in self.policy and index == 1:
            loaded = f"{name} = AutoTokenizer.from_pretrained({self.policy[id(value)]!r})"
            self._parts[statement.lineno, ""] = f"from transformers import AutoTokenizer\n\n{loaded}"
        elif binds and trains:
            does = "trains, or reads the command line"
            self.problems[name] = f"line {statement.lineno} {does}, and {user} uses {name}"
        else:
            if isinstance(getattr(statement, "value", None), ast.Constant) and is_secret(name):
                self.problems[name] = (
                    "looks like a secret and is copied; read it from an environment variable"
                )
            self._keep(statement.lineno, self._text(statement), getattr(statement, "name", name))

    def _text(self, statement: ast.stmt) -> str:
        """Return a statement's lines with their comments; of an indented one without comments."""
        if statement.col_offset:
            return ast.unparse(statement)
        decorators = (decorator.lineno for decorator in getattr(statement, "decorator_list", ()))
        first = min([statement.lineno, *decorators])
        return "\n".join(self.program.lines[first - 1 : statement.end_lineno])

    def _keep(self, line: int, text: str, user: str) -> None:
        """Keep code, and add what it refers to."""
        if (line, text) not in self._parts:
            self._parts[line, text] = text
            for name in sorted({*_globals(symtable.symtable(text, "<script>", "exec"))}):
                self.add(name, user)


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that code takes from outside itself."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        used = symbol.is_declared_global() or (symbol.is_referenced() and (top or symbol.is_global()))
        if used and not (top and symbol.is_imported()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)
