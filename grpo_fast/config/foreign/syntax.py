"""Values in a Python program, read from its syntax tree: nothing of it is imported or run."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_fast.config.secrets import redacted, without_pairs

LARGEST = 1_000_000  # characters of a program
BUDGET = 100_000  # expressions that one value may be made of
LONGEST = 100_000  # characters of a text that is put together
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Questions about the machine, which are true on the GPUs that such programs are written for.
ASSUMED = ("is_bfloat16_supported", "is_bf16_supported", "torch.cuda.is_available")
_MUTATORS = ("append", "extend", "update", "add", "insert", "setdefault", "remove", "discard", "pop")
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow},
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_CALLS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (str, int, float, len, min, max)},
    **{"pathlib.Path": str, "os.path.join": os.path.join},
}


class UnreadError(ValueError):
    """The value is known only when the program runs."""


@dataclass(frozen=True)
class Expression:
    """An expression where it stands; `index` is its part of the tuple that the expression makes."""

    node: ast.expr
    scope: Scope
    index: int | None = None


@dataclass(frozen=True)
class Binding:
    """What gives a name its value; `value` is missing of a definition and an import."""

    statement: ast.stmt
    value: ast.expr | None = None
    index: int | None = None
    sure: bool = True


@dataclass
class Scope:
    """The names of the module, or of a function as one call enters it."""

    parent: Scope | None = None
    parameters: dict[str, Expression] = field(default_factory=dict)
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    changes: dict[str, list[ast.stmt]] = field(default_factory=dict)  # of a name's object
    returns: list[tuple[ast.expr, bool]] = field(default_factory=list)

    def find(self, node: ast.Name) -> tuple[Binding | Expression, Scope]:
        """Return the last binding of a name before it is used, or a call's argument."""
        scope: Scope | None = self
        before: tuple[float, int] = (node.lineno, node.col_offset)
        while scope is not None:
            for found in reversed(scope.bindings.get(node.id, ())):
                last = found.value or found.statement
                if (last.end_lineno or 0, last.end_col_offset or 0) > before:
                    continue
                if not found.sure:
                    raise UnreadError(
                        f"line {found.statement.lineno} decides on {node.id} when the script runs"
                    )
                return found, scope
            if node.id in scope.parameters:
                return scope.parameters[node.id], scope
            scope, before = scope.parent, (float("inf"), 0)
        raise UnreadError(f"line {node.lineno}: {node.id} is not assigned in the script")


class Program:
    """The syntax tree of a program, with the names that its statements bind.

    Raises:
        ValueError: the text is no Python, or too long.
    """

    def __init__(self, text: str) -> None:
        if len(text) > LARGEST:
            raise ValueError(f"has {len(text):,} characters, of at most {LARGEST:,}; move its data to a file")
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"line {error.lineno or 1}: {error.msg}, which is no Python") from None
        except (RecursionError, MemoryError, ValueError) as error:
            raise ValueError(f"cannot be parsed: {str(error) or 'it is nested too deeply'}") from None
        self.lines = text.split("\n")
        self._left = BUDGET
        self.aliases: dict[str, str] = {}
        self.calls: list[ast.Call] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self.calls.append(node)
            elif isinstance(node, ast.Import):
                self.aliases |= {a.asname: a.name for a in node.names if a.asname}
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.aliases |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
        self.module = Scope()
        self._bind(self.tree.body, self.module)

    # Names

    def _bind(self, body: Sequence[ast.stmt], scope: Scope, outer: ast.stmt | None = None) -> None:
        """Enter what statements bind, in order; `outer` is the one that may not be carried out."""
        for node in body:
            statement, sure = outer or node, outer is None
            match node:
                case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                    self._assign(target, Binding(statement, value, None, sure), scope)
                case ast.AugAssign(target=ast.Name(id=name)):
                    scope.changes.setdefault(name, []).append(statement)
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method))):
                    if method in _MUTATORS:
                        scope.changes.setdefault(name, []).append(statement)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    scope.bindings.setdefault(node.name, []).append(Binding(statement, sure=sure))
                case ast.Import() | ast.ImportFrom():
                    for alias in node.names:
                        name = (alias.asname or alias.name).partition(".")[0]
                        scope.bindings.setdefault(name, []).append(Binding(statement))
                case ast.Return(value=ast.expr() as value):
                    scope.returns.append((value, sure))
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))) | ast.With():
                    self._bind(node.body, scope, outer)
                case ast.For():
                    self._assign(node.target, Binding(statement, node.iter, None, sure=False), scope)
                    self._bind(node.body, scope, statement)
                case ast.If() | ast.While() | ast.Try():
                    self._bind([*node.body, *node.orelse], scope, statement)

    def _assign(self, target: ast.expr, binding: Binding, scope: Scope) -> None:
        match target:
            case ast.Name(id=name) if binding.value is not None:
                scope.bindings.setdefault(name, []).append(binding)
            case ast.Tuple(elts=parts):
                for index, part in enumerate(parts):
                    if isinstance(part, ast.Name):
                        one = Binding(binding.statement, binding.value, index, binding.sure)
                        scope.bindings.setdefault(part.id, []).append(one)
            case ast.Subscript(value=ast.Name(id=name)) | ast.Attribute(value=ast.Name(id=name)):
                scope.changes.setdefault(name, []).append(binding.statement)

    def dotted(self, node: ast.AST) -> str:
        """Return `package.module.name` for a name, by the imports; nothing for another expression."""
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        return self.aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def source(self, node: ast.expr) -> str:
        """Return an expression's text as it may be shown: on one line, without secrets."""
        return str(without_pairs(redacted(" ".join(self.segment(node).split()))))

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node; `ast.get_source_segment` splits the whole text each time."""
        lines = [line.encode() for line in self.lines[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"\n".join(lines).decode()

    def unread(self, node: ast.expr, problem: str = "is known only when the script runs") -> UnreadError:
        """Return the error that names a place of the script."""
        return UnreadError(f"line {node.lineno}: {self.source(node)[:80]} {problem}")

    def enter(self, function: Function, call: Expression | None) -> Scope:
        """Return the names inside a function, with the arguments of a call."""
        names = [argument.arg for argument in function.args.args]
        defaults = zip(names[::-1], function.args.defaults[::-1], strict=False)
        scope = Scope(self.module, {name: Expression(default, self.module) for name, default in defaults})
        if call is not None:
            scope.parameters |= self.arguments(call, names)[0]
        self._bind(function.body, scope)
        return scope

    def follow(self, place: Expression) -> Expression:
        """Return the expression that names, and functions of the script with one `return`, lead to."""
        for _ in range(100):
            node, scope, index = place.node, place.scope, place.index
            match node:
                case ast.Name():
                    found, home = scope.find(node)
                    if isinstance(found, Expression):
                        place = Expression(found.node, found.scope, index)
                    elif found.value is not None:
                        place = Expression(found.value, home, index if found.index is None else found.index)
                    else:
                        return place
                case ast.Tuple(elts=parts) if index is not None and index < len(parts):
                    place = Expression(parts[index], scope)
                case ast.Call(func=ast.Name(id=name)) if name in self.module.bindings:
                    function = self.module.bindings[name][-1].statement
                    if not isinstance(function, Function):
                        return place
                    inside = self.enter(function, Expression(node, scope))
                    if not inside.returns or not inside.returns[0][1]:
                        raise self.unread(node, "decides what it returns")
                    place = Expression(inside.returns[0][0], inside, index)
                case _:
                    return place
        raise self.unread(place.node, "leads in a circle")

    def arguments(self, place: Expression, names: Sequence[str]) -> tuple[dict[str, Expression], list[str]]:
        """Return a call's arguments by name, and why some could not be read.

        Args:
            names: of the positional arguments.
        """
        call, found, problems = place.node, {}, []
        assert isinstance(call, ast.Call)
        for position, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred) or position >= len(names):
                problems.append(str(self.unread(argument, "is one argument too many")))
                break
            found[names[position]] = Expression(argument, place.scope)
        for keyword in call.keywords:
            inner = Expression(keyword.value, place.scope)
            if keyword.arg:
                found[keyword.arg] = inner
                continue
            try:
                self._check_unchanged(inner)
                end = self.follow(inner)
                if not isinstance(end.node, ast.Dict):
                    raise self.unread(end.node)
                for key, value in zip(end.node.keys, end.node.values, strict=True):
                    if not isinstance(key, ast.Constant):
                        raise self.unread(end.node)
                    found[str(key.value)] = Expression(value, end.scope)
            except UnreadError as reason:
                problems.append(str(reason))
        return found, problems

    def _check_unchanged(self, place: Expression) -> None:
        if isinstance(place.node, ast.Name) and (changes := place.scope.changes.get(place.node.id)):
            raise UnreadError(f"line {changes[0].lineno} changes {place.node.id}")

    # Values

    def read(self, place: Expression) -> Any:
        """Return a value, tuples and sets as lists, a dtype of torch as its name.

        Raises:
            UnreadError: it is known only when the program runs.
        """
        self._left = BUDGET
        try:
            return self._value(place)
        except RecursionError:
            raise UnreadError(f"line {place.node.lineno}: is nested too deeply") from None

    def _value(self, place: Expression) -> Any:
        self._left -= 1
        if self._left < 0:
            raise UnreadError(f"line {place.node.lineno}: has too many parts; move them to a file")
        self._check_unchanged(place)
        end = self.follow(place)
        if end.index is not None:
            raise self.unread(end.node)
        try:
            found = self._computed(end.node, lambda inner: self._value(Expression(inner, end.scope)))
        except UnreadError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise self.unread(end.node, f"fails: {error}") from None
        if isinstance(found, str) and len(found) > LONGEST:
            raise self.unread(end.node, "is too long; move it to a file")
        return found

    def _computed(self, node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None as constant):
                return constant
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [value(item) for item in parts]
            case ast.Dict() if None not in node.keys:
                return {
                    value(key): value(one) for key, one in zip(node.keys, node.values, strict=True) if key
                }
            case ast.JoinedStr():
                return "".join(str(value(part)) for part in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return value(node.value)
            case ast.UnaryOp() if type(node.op) in _UNARY:
                return _UNARY[type(node.op)](value(node.operand))
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                left, right = value(node.left), value(node.right)
                numbers = all(isinstance(side, int | float) and abs(side) < 1e9 for side in (left, right))
                texts = isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str)
                if texts or (numbers and (abs(right) <= 64 or not isinstance(node.op, ast.Pow))):
                    return _ARITHMETIC[type(node.op)](left, right)
            case ast.IfExp():
                return value(node.body if value(node.test) else node.orelse)
            case ast.Subscript() if not isinstance(node.slice, ast.Slice):
                return value(node.value)[value(node.slice)]
            case ast.Attribute(attr="bfloat16" | "float16" | "float32" as dtype):
                return dtype
            case ast.Call(keywords=[]) if self.dotted(node.func) in _CALLS:
                return _CALLS[self.dotted(node.func)](*map(value, node.args))
            case ast.Call() if self.dotted(node.func).endswith(ASSUMED):
                return True
            case ast.Call(func=ast.Name(id="dict"), args=[]) if all(one.arg for one in node.keywords):
                return {one.arg: value(one.value) for one in node.keywords}
        raise self.unread(node)
