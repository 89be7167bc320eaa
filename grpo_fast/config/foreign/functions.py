"""The functions that a run needs of a script: their text as it stands, and what they refer to."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import textwrap
from collections.abc import Iterator

from grpo_fast.config.foreign.syntax import Binding, Program, Scope
from grpo_fast.config.secrets import is_secret

# What trains, loads what is trained, or reads the command line.
_ENDS = ("Trainer", "get_peft_model", "parse_args", "parse_known_args", "parse_args_into_dataclasses")


class Functions:
    """A file of functions, constants, classes and imports of a script.

    Args:
        policy: calls that load the model to train, with the code that loads its tokenizer.
    """

    def __init__(self, program: Program, policy: dict[int, str]) -> None:
        self.program, self.policy = program, policy
        self.problems: dict[str, str] = {}  # name: what is missing in the file, or wrong with it
        self._names: set[str] = set()
        self._parts: dict[tuple[int, int, str], str] = {}  # by their place in the script
        self._written: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._parts or self._written)

    def text(self, script: str) -> str:
        """Return the file."""
        blocks = [f'"""What {script} defines for its rewards and data."""']
        blocks += ["from __future__ import annotations"] * ("annotations" in self.program.aliases)
        for part in [*(part for _, part in sorted(self._parts.items())), *self._written]:
            is_definition = re.search("^(async def|def|class) ", part, re.MULTILINE)
            blocks += ["\n", part, "\n"] if is_definition else [part]
        return "\n".join(blocks).rstrip() + "\n"

    def add(self, name: str, scope: Scope, user: str = "") -> None:
        """Keep what a name stands for, and what that refers to."""
        home: Scope | None = scope
        while home is not None and name not in home.bindings:
            if name in home.parameters:
                self.problems[name] = f"{user} refers to it, and it is an argument of a function"
                return
            home = home.parent
        if name in self._names:
            return
        if home is None:
            if not hasattr(builtins, name) and name not in ("__name__", "__file__", "__doc__"):
                self.problems[name] = f"the script does not define it, and {user} refers to it"
            return
        self._names.add(name)
        for binding in home.bindings[name]:
            self._bound(name, binding, home, user)
        for change in home.changes.get(name, ()):
            self._keep(change, home)

    def define(self, name: str, text: str, scope: Scope) -> str:
        """Write code of one's own after the rest, as text around NAME; return the name that it got."""
        taken = {*self._names, *self.program.module.bindings, *scope.bindings}
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        self._names.add(unique)
        text = text.replace("NAME", unique, 1)
        self._refer(text, scope, unique)
        self._written.append(text)
        return unique

    def _bound(self, name: str, binding: Binding, home: Scope, user: str) -> None:
        statement = binding.statement
        if isinstance(statement, ast.Import | ast.ImportFrom):
            kept = [one for one in statement.names if (one.asname or one.name).partition(".")[0] == name]
            only: ast.stmt = ast.Import(kept)
            if isinstance(statement, ast.ImportFrom):
                only = ast.ImportFrom(statement.module, kept, statement.level)
            self._parts[statement.lineno, statement.col_offset, name] = ast.unparse(only)
            return
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        loaders = [self.policy[id(call)] for call in calls if id(call) in self.policy]
        if loaders and binding.index == 1:
            text = f"from transformers import AutoTokenizer\n\n{name} = {loaders[0]}"
            self._parts[statement.lineno, statement.col_offset, text] = text
            return
        trains = loaders or any(self.program.dotted(call.func).endswith(_ENDS) for call in calls)
        if binding.value is not None and trains:
            told = "trains, or reads the command line, for what"
            self.problems[name] = f"line {statement.lineno} {told} {user} refers to"
            return
        if isinstance(binding.value, ast.Constant) and is_secret(name):
            self.problems[name] = "looks like a secret, and is copied as it stands; read it from a variable"
        self._keep(statement, home)

    def _keep(self, statement: ast.stmt, scope: Scope) -> None:
        text = self._text(statement)
        key = (statement.lineno, statement.col_offset, text)
        if key not in self._parts:
            self._parts[key] = text
            self._refer(text, scope, getattr(statement, "name", f"line {statement.lineno}"))

    def _text(self, statement: ast.stmt) -> str:
        """Return the lines of a statement with the comments above it."""
        lines, last = self.program.lines, statement.end_lineno or statement.lineno
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]) - 1
        before = lines[statement.lineno - 1].encode()[: statement.col_offset].decode().strip()
        after = lines[last - 1].encode()[statement.end_col_offset or 0 :].decode().strip()
        texts = (node for node in ast.walk(statement) if isinstance(node, ast.Constant | ast.JoinedStr))
        if statement.col_offset and any(node.lineno != node.end_lineno for node in texts):
            return ast.unparse(statement)  # whose text would change with its indentation
        if before or (after and not after.startswith("#")):
            return ast.unparse(statement)  # one of several in a line
        while first and lines[first - 1].strip().startswith("#") and not lines[first - 1].startswith("#!"):
            first -= 1
        return textwrap.dedent("\n".join(lines[first:last]))

    def _refer(self, text: str, scope: Scope, user: str) -> None:
        for name in sorted({*_globals(symtable.symtable(text, "<script>", "exec"))}):
            self.add(name, scope, user)


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that code takes from outside itself."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()) and not (top and symbol.is_imported()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)
