"""The functions that a run needs of a script: their text as it stands, and what they refer to."""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
from collections.abc import Iterator

from grpo_fast.config.foreign.syntax import Binding, Expression, Program, Scope, UnreadError
from grpo_fast.config.secrets import is_secret, redacted

# What trains, loads what is trained, or reads the command line.
_ENDS = ("Trainer", "get_peft_model", "parse_args", "parse_known_args", "parse_args_into_dataclasses")
_MUTATORS = ("append", "extend", "update", "add", "insert", "setdefault", "remove", "discard", "pop")


class Functions:
    """A file of functions, constants, classes and imports of a script.

    Args:
        policy: calls that load the model to train, or its tokenizer, with the code that loads the latter.
    """

    def __init__(self, program: Program, policy: dict[int, str]) -> None:
        self.program, self.policy = program, policy
        self.problems: dict[str, str] = {}  # name: what is missing in the file
        self.notes: dict[str, str] = {}  # name: what its value rests on
        self._names: set[str] = set()
        self._parts: dict[tuple[int, int, str], str] = {}  # by their place in the script
        self._written: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._parts or self._written)

    def text(self, script: str) -> str:
        """Return the file."""
        blocks = [f'"""What {script} defines for its rewards and data."""']
        froms = [node for node in self.program.tree.body if isinstance(node, ast.ImportFrom)]
        future = [ast.unparse(node) for node in froms if node.module == "__future__"]
        before = ""
        for part in [*future, *(part for _, part in sorted(self._parts.items())), *self._written]:
            both = [_is_definition(part) or _is_definition(before), *map(_is_import, (part, before))]
            blocks += ["", ""] if both[0] else [] if both[1] and both[2] else [""]
            blocks.append(part)
            before = part
        return "\n".join(blocks) + "\n"

    def add(self, name: str, scope: Scope, user: str = "") -> None:
        """Keep what a name stands for, and what that refers to."""
        home: Scope | None = scope
        while home is not None and name not in home.bindings:
            if name in home.parameters:
                self._constant(name, home.parameters[name], user)
                return
            home = home.parent
        if name in self._names:
            return
        if home is None:
            if not hasattr(builtins, name) and name not in ("__name__", "__file__", "__doc__"):
                self._star(name, user)
            return
        self._names.add(name)
        for binding in home.bindings[name]:
            self._bound(name, binding, home, user)
        imports = ast.Import | ast.ImportFrom
        if any(isinstance(binding.statement, imports) for binding in home.bindings[name]):
            return
        for change in home.changes.get(name, ()):
            match change:
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method))) if method not in _MUTATORS:
                    continue
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
        statement, value = binding.statement, binding.value
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name).partition(".")[0] == name:
                    self._part(statement, ast.unparse(_only(statement, alias)))
            return
        inner = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        loader = next((self.policy[id(call)] for call in inner if id(call) in self.policy), None)
        if loader and binding.index == 1:
            self._part(statement, f"from transformers import AutoTokenizer\n\n{name} = {loader}")
            return
        is_code = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not is_code and (
            loader is not None or any(self.program.dotted(call.func).endswith(_ENDS) for call in inner)
        ):
            self.problems[name] = (
                f"line {statement.lineno} trains, or reads the command line, for what {user} refers to"
            )
            return
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(text, str) and (is_secret(name) or redacted(text) != text):
            self.notes[name] = "looks like a secret, and is copied as it stands; read it from a variable"
        self._keep(statement, home)

    def _keep(self, statement: ast.stmt, scope: Scope) -> None:
        text = self._text(statement)
        if self._part(statement, text):
            name = getattr(statement, "name", f"line {statement.lineno}")
            self._refer(text, scope, name)

    def _part(self, statement: ast.stmt, text: str) -> bool:
        key = (statement.lineno, statement.col_offset, text)
        is_new = key not in self._parts
        self._parts[key] = text
        return is_new

    def _text(self, statement: ast.stmt) -> str:
        """Return the lines of a statement with the comments above it."""
        lines = self.program.lines
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]) - 1
        last = statement.end_lineno or first
        alone = not lines[statement.lineno - 1].encode()[: statement.col_offset].strip() or first < (
            statement.lineno - 1
        )
        rest = lines[last - 1].encode()[statement.end_col_offset or 0 :].decode().strip()
        if not alone or (rest and not rest.startswith("#")):
            return self.program.segment(statement) if not statement.col_offset else ast.unparse(statement)
        while first and lines[first - 1].strip().startswith("#") and not lines[first - 1].startswith("#!"):
            first -= 1
        text = "\n".join(lines[first:last])
        if not statement.col_offset:
            return text
        texts = (node for node in ast.walk(statement) if isinstance(node, ast.Constant | ast.JoinedStr))
        if any(node.lineno != node.end_lineno for node in texts):
            return ast.unparse(statement)  # whose text would change with its indentation
        return textwrap.dedent(text)

    def _refer(self, text: str, scope: Scope, user: str) -> None:
        for name in sorted({*_globals(symtable.symtable(text, "<script>", "exec"))}):
            self.add(name, scope, user)

    def _constant(self, name: str, place: Expression, user: str) -> None:
        """Write an argument of a call that encloses a function."""
        try:
            value, note = self.program.read(place)
        except UnreadError as reason:
            self.problems[name] = f"{reason}; {user} refers to it"
            return
        line = f"{name} = {value!r}"
        if name in self._names and line not in self._written:
            self.problems[name] = f"line {place.node.lineno}: has several values; {user} refers to it"
        elif name not in self._names:
            self._names.add(name)
            self._written.insert(0, line)
            self.notes |= {name: note} if note else {}

    def _star(self, name: str, user: str) -> None:
        stars = [
            node
            for node in self.program.tree.body
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        ]
        for node in stars:
            self._part(node, ast.unparse(node))
        if not stars:
            self.problems[name] = f"the script does not define it, and {user} refers to it"


def _is_import(part: str) -> bool:
    return part.startswith(("import ", "from "))


def _is_definition(part: str) -> bool:
    return any(line.startswith(("def ", "class ", "async def ")) for line in part.split("\n"))


def _only(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import(names=[alias])
    return ast.ImportFrom(module=statement.module, names=[alias], level=statement.level)


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that code takes from outside itself."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()) and not (top and symbol.is_imported()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)
