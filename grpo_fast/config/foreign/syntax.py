"""Values in a Python program, read from its syntax tree: nothing of it is imported or run."""

from __future__ import annotations

import ast
import operator
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_fast.config.secrets import redacted, without_pairs

LARGEST = 1_000_000  # characters of a program
BUDGET = 100_000  # expressions that one value may be made of
LONGEST = 100_000  # characters of a text that is put together
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Questions about the machine, and what they are on the GPUs that such programs are written for.
ASSUMED = ("is_bfloat16_supported", "is_bf16_supported", "torch.cuda.is_available")
DTYPES = ("bfloat16", "float16", "float32")
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.Gt: operator.gt},
    **{ast.LtE: operator.le, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    ast.In: lambda item, of: item in of,
    ast.NotIn: lambda item, of: item not in of,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    **{ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_},
}
_CALLS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (str, int, float, bool, len, min, max, abs, round)},
    **{"list": list, "tuple": list, "set": sorted, "sorted": sorted, "dict": dict},
    **{"pathlib.Path": str, "os.path.join": os.path.join, "textwrap.dedent": textwrap.dedent},
}
_TEXT = ("strip", "lstrip", "rstrip", "lower", "upper")


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
    """What gives a name its value, with the statement to copy it by; `value` is missing of a definition."""

    statement: ast.stmt
    value: ast.expr | None = None
    index: int | None = None
    sure: bool = True

    @property
    def end(self) -> tuple[int, int]:
        node = self.value or self.statement
        return (node.end_lineno or 0, node.end_col_offset or 0)


@dataclass
class Scope:
    """The names of the module, or of a function as one call enters it."""

    parent: Scope | None = None
    parameters: dict[str, Expression] = field(default_factory=dict)
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    changes: dict[str, list[ast.stmt]] = field(default_factory=dict)  # of a name's object
    attributes: list[tuple[str, str, ast.expr]] = field(default_factory=list)  # object, name and new value
    returns: list[tuple[ast.expr, bool]] = field(default_factory=list)

    def find(self, node: ast.Name) -> tuple[Binding | Expression, Scope]:
        """Return the last binding of a name before it is used, or a call's argument."""
        scope: Scope | None = self
        before: tuple[float, int] = (node.lineno, node.col_offset)
        while scope is not None:
            if found := [one for one in scope.bindings.get(node.id, ()) if one.end <= before]:
                within = range(found[-1].statement.lineno, (found[-1].statement.end_lineno or 0) + 1)
                if not (found[-1].sure or node.lineno in within):
                    line = found[-1].statement.lineno
                    raise UnreadError(f"line {line} decides on {node.id} when the script runs")
                return found[-1], scope
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
        self.text, self.lines = text, text.split("\n")
        self.notes: list[str] = []  # what the value that was read last rests on
        self.decided: dict[str, str] = {}  # line of an `if`, and what its outcome rests on
        self._left = BUDGET
        self.aliases: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self.aliases |= {a.asname: a.name for a in node.names if a.asname}
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.aliases |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
        self.calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        self.module = Scope()
        self._bind(self.tree.body, self.module)

    # Names

    def _bind(self, body: Sequence[ast.stmt], scope: Scope, outer: ast.stmt | None = None) -> None:
        """Enter what statements bind, in order; `outer` is the one that may not be carried out."""
        for node in body:
            statement, sure = outer or node, outer is None
            if isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value, statement, scope, sure)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                scope.changes.setdefault(node.target.id, []).append(node)
            elif isinstance(node, Function | ast.ClassDef):
                scope.bindings.setdefault(node.name, []).append(Binding(statement, sure=sure))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = (alias.asname or alias.name).partition(".")[0]
                    scope.bindings.setdefault(name, []).append(Binding(statement))
            elif isinstance(node, ast.Return) and node.value is not None:
                scope.returns.append((node.value, sure))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = node.value.func
                if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                    scope.changes.setdefault(called.value.id, []).append(statement)
            elif isinstance(node, ast.If):
                self._branch(node, scope, outer)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                if not isinstance(node, ast.While):
                    self._assign(node.target, node.iter, statement, scope, sure=False)
                self._bind([*node.body, *node.orelse], scope, statement)
            elif isinstance(node, ast.With | ast.AsyncWith):
                self._bind(node.body, scope, outer)
            elif isinstance(node, ast.Try):
                self._bind([*node.body, *node.orelse, *node.finalbody], scope, statement)

    def _branch(self, node: ast.If, scope: Scope, outer: ast.stmt | None) -> None:
        main = isinstance(node.test, ast.Compare) and self.dotted(node.test.left) == "__name__"
        try:
            taken, rests_on = (True, "") if main else self.read(Expression(node.test, scope))
        except UnreadError:
            self._bind([*node.body, *node.orelse], scope, outer or node)
        else:
            if rests_on:
                self.decided[f"line {node.lineno}"] = rests_on
            self._bind(node.body if taken else node.orelse, scope, outer)

    def _assign(
        self, target: ast.expr, value: ast.expr | None, statement: ast.stmt, scope: Scope, sure: bool
    ) -> None:
        if isinstance(target, ast.Name) and value is not None:
            scope.bindings.setdefault(target.id, []).append(Binding(statement, value, None, sure))
        elif isinstance(target, ast.Tuple | ast.List):
            for index, part in enumerate(target.elts):
                if isinstance(part, ast.Name):
                    scope.bindings.setdefault(part.id, []).append(Binding(statement, value, index, sure))
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            scope.changes.setdefault(target.value.id, []).append(statement)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and value is not None:
            scope.attributes.append((target.value.id, target.attr, value))
            scope.changes.setdefault(target.value.id, []).append(statement)

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

    def enter(self, function: Function, call: ast.Call | None, around: Scope) -> Scope:
        """Return the names inside a function, with a call's arguments where there is one call."""
        names = function.args
        ordered = [argument.arg for argument in (*names.posonlyargs, *names.args)]
        optional = [*zip(ordered[::-1], names.defaults[::-1], strict=False)]
        optional += [(a.arg, d) for a, d in zip(names.kwonlyargs, names.kw_defaults, strict=True) if d]
        given = {name: Expression(default, self.module) for name, default in optional}
        if call is not None:
            given |= self.arguments(Expression(call, around), ordered)[0]
        scope = Scope(self.module, {name: value for name, value in given.items() if name.isidentifier()})
        self._bind(function.body, scope)
        return scope

    def definition(self, node: ast.AST, scope: Scope) -> ast.stmt | None:
        """Return the function or class of the script that a name stands for."""
        if not isinstance(node, ast.Name):
            return None
        try:
            found = scope.find(node)[0]
        except UnreadError:
            return None
        is_defined = isinstance(found, Binding) and isinstance(found.statement, Function | ast.ClassDef)
        return found.statement if is_defined and isinstance(found, Binding) else None

    def follow(self, place: Expression) -> Expression:
        """Return the expression that names, and functions of the script with one `return`, lead to."""
        for _ in range(100):
            node, scope, index = place.node, place.scope, place.index
            if isinstance(node, ast.Name):
                found, home = scope.find(node)
                if isinstance(found, Expression):
                    place = Expression(found.node, found.scope, index)
                elif found.value is not None:
                    place = Expression(found.value, home, index if found.index is None else found.index)
                else:
                    return place
            elif isinstance(node, ast.Tuple | ast.List) and index is not None and index < len(node.elts):
                place = Expression(node.elts[index], scope)
            elif isinstance(node, ast.Call) and isinstance(
                function := self.definition(node.func, scope), Function
            ):
                inside = self.enter(function, node, scope)
                if not inside.returns or not inside.returns[0][1]:
                    raise UnreadError(f"line {node.lineno}: {function.name}() decides what it returns")
                place = Expression(inside.returns[0][0], inside, index)
            else:
                return place
        raise UnreadError(f"line {place.node.lineno}: {self.source(place.node)} leads in a circle")

    # Calls

    def arguments(self, place: Expression, names: Sequence[str]) -> tuple[dict[str, Expression], list[str]]:
        """Return a call's arguments by name, and why some could not be read.

        Args:
            names: of the positional arguments; the first is enough where the others are not given.
        """
        call, found, problems = place.node, {}, []
        assert isinstance(call, ast.Call)
        for position, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred) or position >= len(names):
                problems.append(f"line {argument.lineno}: {self.source(argument)} is one argument too many")
                break
            found[names[position]] = Expression(argument, place.scope)
        for keyword in call.keywords:
            inner = Expression(keyword.value, place.scope)
            try:
                found |= {keyword.arg: inner} if keyword.arg else dict(self.items(inner))
            except UnreadError as reason:
                problems.append(str(reason))
        return found, problems

    def items(self, place: Expression) -> Iterator[tuple[str, Expression]]:
        """Yield the entries of a dictionary that is written down."""
        end = self.follow(place)
        node, scope = end.node, end.scope
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                inner = Expression(value, scope)
                if key is None:
                    yield from self.items(inner)
                else:
                    yield str(self.value(Expression(key, scope))), inner
        elif isinstance(node, ast.Call) and self.dotted(node.func) == "dict":
            found, problems = self.arguments(end, ())
            if problems:
                raise UnreadError(problems[0])
            yield from found.items()
        else:
            raise self._unread(place.node)
        if isinstance(place.node, ast.Name):
            for change in place.scope.changes.get(place.node.id, ()):
                if not (isinstance(change, ast.Assign) and isinstance(change.targets[0], ast.Subscript)):
                    raise UnreadError(f"line {change.lineno} changes {place.node.id}")
                inner = Expression(change.targets[0].slice, place.scope)
                yield str(self.value(inner)), Expression(change.value, place.scope)

    # Values

    def read(self, place: Expression) -> tuple[Any, str]:
        """Return a value and what it rests on.

        Raises:
            UnreadError: it is known only when the program runs.
        """
        self.notes, self._left = [], BUDGET
        try:
            return self.value(place), "; ".join(dict.fromkeys(self.notes))
        except RecursionError:
            raise UnreadError(f"line {place.node.lineno}: is nested too deeply") from None

    def value(self, place: Expression) -> Any:
        """Return a value, tuples and sets as lists, a dtype of torch as its name; raises as `read`."""
        self._left -= 1
        if self._left < 0:
            raise UnreadError(f"line {place.node.lineno}: has too many parts; move them to a file")
        end = self.follow(place)
        node = end.node
        if end.index is not None:
            raise self._unread(node)
        changes = place.scope.changes.get(place.node.id, ()) if isinstance(place.node, ast.Name) else ()
        if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and self.dotted(node.func) == "dict"):
            return {key: self.value(item) for key, item in self.items(place)}
        if changes and isinstance(node, ast.List | ast.Set | ast.Constant | ast.BinOp):
            raise UnreadError(f"line {changes[0].lineno} changes {self.source(place.node)}")
        try:
            return self._computed(node, lambda inner: self.value(Expression(inner, end.scope)), end.scope)
        except UnreadError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UnreadError(f"line {node.lineno}: {self.source(node)} fails: {error}") from None

    def _computed(self, node: ast.expr, value: Callable[[ast.expr], Any], scope: Scope) -> Any:
        match node:
            case ast.Constant() if isinstance(node.value, str | int | float | None):
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [value(item) for item in node.elts]
            case ast.JoinedStr():
                return self._bounded("".join(str(value(part)) for part in node.values), node)
            case ast.FormattedValue() if node.conversion == -1 and node.format_spec is None:
                return value(node.value)
            case ast.UnaryOp() if type(node.op) in _UNARY:
                return _UNARY[type(node.op)](value(node.operand))
            case ast.BinOp(op=ast.Mult(), left=ast.List() as many, right=times):
                return self._repeated(many, value(times), value)
            case ast.ListComp(
                elt=one,
                generators=[
                    ast.comprehension(
                        target=ast.Name(id=name),
                        iter=ast.Call(func=ast.Name(id="range"), args=[times]),
                        ifs=[],
                    )
                ],
            ) if not any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(one)):
                return self._repeated(ast.List([one]), value(times), value)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                return self._arithmetic(node, value(node.left), value(node.right))
            case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _ARITHMETIC:
                return _ARITHMETIC[type(node.ops[0])](value(node.left), value(node.comparators[0]))
            case ast.BoolOp():
                for part in node.values[:-1]:
                    if bool(found := value(part)) == isinstance(node.op, ast.Or):
                        return found
                return value(node.values[-1])
            case ast.IfExp():
                return value(node.body if value(node.test) else node.orelse)
            case ast.Subscript() if not isinstance(node.slice, ast.Slice):
                if self.dotted(node.value) != "os.environ":
                    return value(node.value)[value(node.slice)]
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Call():
                return self._called(node, value)
        raise self._unread(node)

    def _repeated(self, many: ast.List, times: int, value: Callable[[ast.expr], Any]) -> Any:
        before = self._left
        rows = [value(item) for item in many.elts]
        self._left -= (before - self._left) * max(0, times)
        if self._left < 0:
            raise UnreadError("has too many parts; move them to a file")
        return rows * times

    def _arithmetic(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        both = (left, right)
        if all(isinstance(side, int | float) for side in both):
            large = isinstance(node.op, ast.Pow) and (abs(right) > 64 or abs(left) > 1e6)
            if large or any(abs(side) > 1e18 for side in both):
                raise self._unread(node)
        elif not (
            isinstance(node.op, ast.Add) and isinstance(left, str | list) and type(left) is type(right)
        ):
            raise self._unread(node)
        return self._bounded(_ARITHMETIC[type(node.op)](left, right), node)

    def _bounded(self, value: Any, node: ast.expr) -> Any:
        if isinstance(value, str | list) and len(value) > LONGEST:
            raise UnreadError(f"line {node.lineno}: is too long; move it to a file")
        return value

    def _called(self, node: ast.Call, value: Callable[[ast.expr], Any]) -> Any:
        name = self.dotted(node.func)
        if name.endswith(ASSUMED):
            self.notes.append(f"{name}() counts as true")
            return True
        if name in ("os.environ.get", "os.getenv") and len(node.args) == 2:
            self.notes.append(f"the default of the variable {value(node.args[0])}")
            return value(node.args[1])
        if name in _CALLS and not node.keywords:
            return _CALLS[name](*map(value, node.args))
        match node.func:
            case ast.Attribute(value=owner, attr=method) if method in _TEXT and not node.args:
                if isinstance(text := value(owner), str):
                    return getattr(text, method)()
        raise self._unread(node)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        """Return a dtype, a field of a class of the script, or a command-line argument's default."""
        if self.dotted(node.value) == "torch" and node.attr in DTYPES:
            return node.attr
        owner = self.follow(Expression(node.value, scope))
        kind: ast.AST = owner.node
        if isinstance(kind, ast.Call):
            if self.dotted(kind.func).endswith((".parse_args", ".parse_known_args")):
                return self._option(node)
            given, problems = self.arguments(owner, ())
            if problems:
                raise self._unread(node)
            if node.attr in given:
                return self.value(given[node.attr])
            kind = kind.func
        described = self.definition(kind, owner.scope)
        if isinstance(described, ast.ClassDef):
            fields = Scope(self.module)
            self._bind(described.body, fields)
            for binding in fields.bindings.get(node.attr, ())[-1:]:
                default = binding.value
                if isinstance(default, ast.Call) and self.dotted(default.func) == "dataclasses.field":
                    default = next((k.value for k in default.keywords if k.arg == "default"), None)
                if default is not None:
                    self.notes.append(f"the default of {described.name}.{node.attr}")
                    return self.value(Expression(default, fields))
        raise self._unread(node)

    def _option(self, node: ast.Attribute) -> Any:
        """Return the default of an argument of argparse."""
        for call in self.calls:
            if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
                continue
            flags = [str(flag.value) for flag in call.args if isinstance(flag, ast.Constant)]
            options = {keyword.arg: keyword.value for keyword in call.keywords}
            names = [flag.lstrip("-").replace("-", "_") for flag in flags]
            if "dest" in options:
                names = [self.value(Expression(options["dest"], self.module))]
            if node.attr not in names:
                continue
            self.notes.append(f"the default of {flags[-1]}")
            action = getattr(options.get("action"), "value", None)
            if "default" in options:
                return self.value(Expression(options["default"], self.module))
            if action in ("store_true", "store_false"):
                return action == "store_false"
        raise UnreadError(f"line {node.lineno}: {self.source(node)} is an argument of the command line")

    def _unread(self, node: ast.expr) -> UnreadError:
        return UnreadError(f"line {node.lineno}: {self.source(node)[:80]} is known only when the script runs")
