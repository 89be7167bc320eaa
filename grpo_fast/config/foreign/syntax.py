"""Values in a Python program, read from its syntax tree: nothing of it is imported or run.

Names in an expression are replaced by what they stand for, so the call of a trainer holds all its arguments.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from grpo_fast.config.secrets import redacted, without_pairs

LARGEST = 1_000_000  # characters of a program
BUDGET = 100_000  # nodes of one expression
LONGEST = 100_000  # characters of a string
MOST_CALLS = 100  # of the program's functions
# True on the GPUs that such programs are written for.
ASSUMED = ("is_bfloat16_supported", "is_bf16_supported", "torch.cuda.is_available")
_MUTATORS = ("append", "extend", "update", "add", "insert", "setdefault", "remove", "discard", "pop")
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv},
}
_CALLS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (str, int, float, len, min, max)},
    **{"pathlib.Path": str, "os.path.join": os.path.join},
}
_SCOPES = ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class UnreadError(ValueError):
    """The value is known only when the program runs."""


class Program(ast.NodeTransformer):
    """The calls of a program with their arguments, and the statements that bind its names.

    Raises:
        ValueError: the text is not Python, or is too long.
        RecursionError: it is nested too deeply.
    """

    def __init__(self, text: str) -> None:
        if len(text) > LARGEST:
            raise ValueError(f"has {len(text):,} characters, of at most {LARGEST:,}; move its data to a file")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"line {error.lineno or 1}: {error.msg}, which is not Python") from None
        except (RecursionError, MemoryError, ValueError) as error:
            raise ValueError(f"cannot be parsed: {str(error) or 'it is nested too deeply'}") from None
        self.lines = text.split("\n")
        self.calls: list[ast.Call] = []
        self.names: dict[str, Any] = {}  # expressions, by the names that stand for them
        self.values: dict[str, Any] = {}  # the last one of each name, of those inside functions too
        self.statements: dict[str, list[ast.stmt]] = {}  # that bind or change a name
        self._local: set[str] = set()  # names that only functions bind
        self._functions: dict[str, ast.FunctionDef] = {}
        self._reasons: dict[str, str] = {}  # why the value of a name is not known
        self._open: list[str] = []  # functions that are being read
        self._calls_left, self._nodes = MOST_CALLS, 0
        self._run(tree.body)

    def source(self, node: ast.AST) -> str:
        """Return an expression's text without secrets."""
        return str(without_pairs(redacted(ast.unparse(node))))

    def unread(self, node: ast.expr, problem: str = "is known only when the script runs") -> UnreadError:
        """Return the error about a place of the program."""
        if reason := self._reasons.get(getattr(node, "id", "")):
            return UnreadError(reason)
        return UnreadError(f"line {node.lineno}: {self.source(node)[:80]} {problem}")

    # Statements

    def _run(self, body: Sequence[ast.stmt], outer: ast.stmt | None = None) -> ast.expr | None:
        """Bind names in order, and return what is returned; `outer` is a condition or a loop around."""
        sure = outer is None
        for node in body:
            statement = outer or node
            match node:
                case ast.Import() | ast.ImportFrom():
                    module = "." * node.level + f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    for one in node.names:
                        name = one.asname or (one.name if module else one.name.partition(".")[0])
                        dotted = one.name if one.asname or module else name
                        self._bind(name, ast.Name(module + dotted, lineno=node.lineno), statement)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._bind(node.name, None, statement)
                    if isinstance(node, ast.FunctionDef):
                        self._functions[node.name] = node
                case ast.Assign(targets=[target, *_], value=value):
                    self._assign(target, self._inlined(value), statement)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, self._inlined(value), statement)
                case ast.AugAssign(target=target):
                    self._change(target, statement)
                case ast.Expr(value=value):
                    self._inlined(value)
                    match value:
                        case ast.Call(func=ast.Attribute(value=target, attr=name)) if name in _MUTATORS:
                            self._change(target, statement)
                case ast.Return(value=ast.expr() as value):
                    return self._inlined(value) if sure else None
                case ast.With() | ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    found = self._run(node.body, outer)
                    if sure and found is not None:
                        return found
                    sure = sure and not _returns(node)
                case ast.If(test=ast.Constant(value=holds)):
                    self._run(node.body if holds else node.orelse, outer)
                    sure = sure and not _returns(node)
                case ast.If() | ast.For() | ast.While() | ast.Try():
                    before = {**self.names}
                    if isinstance(node, ast.For):
                        self._assign(node.target, node.iter, statement)
                        self._forget_decided(node, before)
                    self._run([*node.body, *node.orelse], statement)
                    self._forget_decided(node, before)
                    sure = sure and not _returns(node)
        return None

    def _forget_decided(self, node: ast.stmt, before: dict[str, Any]) -> None:
        """Forget the names that a condition or a loop has bound, except those of imports."""
        for name, now in [*self.names.items()]:
            imported = isinstance(now, ast.Name) and now.id.rpartition(".")[2] == name
            if now is not before.get(name) and not imported:
                self._forget(name, f"line {node.lineno} decides on {name} when the script runs")

    def _bind(self, name: str, value: ast.expr | None, statement: ast.stmt) -> None:
        if self._record(name, statement) and value is not None:
            self.values[name] = value
        self._forget(name, "")
        if value is not None:
            self.names[name] = value

    def _record(self, name: str, statement: ast.stmt) -> bool:
        """Keep a statement of a name, unless it is inside a function and the module has the name, too."""
        if not self._open and name in self._local:
            self._local.remove(name)
            del self.statements[name]
        if self._open and name in self.statements and name not in self._local:
            return False
        if self._open:
            self._local.add(name)
        self.statements.setdefault(name, []).append(statement)
        return True

    def _forget(self, name: str, reason: str) -> None:
        self.names.pop(name, None)
        self._reasons[name] = reason

    def _assign(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, value, statement)
            case ast.Tuple(elts=parts):
                items = value.elts if isinstance(value, ast.Tuple | ast.List) else []
                for index, part in enumerate(parts):
                    item: ast.expr = ast.Subscript(value, ast.Constant(index), lineno=target.lineno)
                    self._assign(part, items[index] if index < len(items) else item, statement)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute.startswith("pad"):
                self._record(name, statement)  # nothing is padded here
            case ast.Subscript(value=changed) | ast.Attribute(value=changed):
                self._change(changed, statement)

    def _change(self, target: ast.expr, statement: ast.stmt) -> None:
        """Forget the value of a name that a statement changes."""
        if isinstance(target, ast.Name):
            self._record(target.id, statement)
            self._forget(target.id, f"line {statement.lineno} changes {target.id}")

    # Expressions

    def _inlined(self, node: ast.expr) -> ast.expr:
        before, self._nodes = self._nodes, 0
        found = self.visit(deepcopy(node))
        if self._nodes > BUDGET:
            raise ValueError(f"line {node.lineno}: has too many parts; move them to a file")
        found.nodes, self._nodes = self._nodes, self._nodes + before
        return found

    def visit(self, node: ast.AST) -> Any:
        """Replace names by their values, and calls of the program's functions by what they return."""
        self._nodes += 1
        return node if isinstance(node, _SCOPES) else super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self.names.get(node.id, node)
        self._nodes += getattr(found, "nodes", 0)
        return found

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        self.generic_visit(node)
        return _flat_dict([*zip(node.keys, node.values, strict=True)], node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        self.calls.append(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "dict" and not node.args:
            return _flat_dict(
                [(ast.Constant(one.arg) if one.arg else None, one.value) for one in node.keywords], node
            )
        function = self._functions.get(name)
        if function is None or name in self._open or self._calls_left <= 0:
            return node
        self._calls_left -= 1
        self._open.append(name)
        found = self._returned(function, node)
        self._open.pop()
        # A function that it makes has a name inside of it only.
        is_function = isinstance(found, ast.Lambda) or getattr(found, "id", "") in self._functions
        return node if found is None or is_function else found

    def _returned(self, function: ast.FunctionDef, call: ast.Call) -> ast.expr | None:
        outside, names = self.names, [argument.arg for argument in function.args.args]
        self.names = {name: value for name, value in outside.items() if name not in names}
        self.names |= dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
        self.names |= self.arguments(call, names)[0]
        found = self._run(function.body)
        self.names = outside
        return found

    def arguments(self, call: ast.Call, names: Sequence[str]) -> tuple[dict[str, ast.expr], list[str]]:
        """Return a call's arguments by name, the positional ones by `names`, and why some are missing."""
        found = dict(zip(names, call.args, strict=False))
        problems = [str(self.unread(one, "is one argument too many")) for one in call.args[len(names) :]]
        for keyword in call.keywords:
            if keyword.arg:
                found[keyword.arg] = keyword.value
            elif isinstance(keyword.value, ast.Dict):
                pairs = zip(keyword.value.keys, keyword.value.values, strict=True)
                found |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
                if not all(isinstance(key, ast.Constant) for key in keyword.value.keys):
                    problems.append(str(self.unread(keyword.value)))
            else:
                problems.append(str(self.unread(keyword.value)))
        return found, problems

    def read(self, node: ast.expr) -> Any:
        """Return a value, tuples and sets as lists, a dtype of torch as its name.

        Raises:
            UnreadError: it is known only when the program runs.
        """
        try:
            found = self._computed(node)
        except UnreadError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise self.unread(node, f"fails: {error}") from None
        if isinstance(found, str) and len(found) > LONGEST:
            raise self.unread(node, "is too long; move it to a file")
        return found

    def _computed(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None as constant):
                return constant
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [self.read(part) for part in parts]
            case ast.Dict() if None not in node.keys:
                pairs = zip(node.keys, node.values, strict=True)
                return {self.read(key): self.read(value) for key, value in pairs if key}
            case ast.JoinedStr():
                return "".join(str(self.read(part)) for part in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return self.read(node.value)
            case ast.UnaryOp(op=ast.USub()):
                return -self.read(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return not self.read(node.operand)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                left, right = self.read(node.left), self.read(node.right)
                numbers = isinstance(left, int | float) and isinstance(right, int | float)
                if numbers or (isinstance(node.op, ast.Add) and isinstance(left, str)):
                    return _ARITHMETIC[type(node.op)](left, right)
            case ast.IfExp():
                return self.read(node.body if self.read(node.test) else node.orelse)
            case ast.Subscript() if not isinstance(node.slice, ast.Slice):
                return self.read(node.value)[self.read(node.slice)]
            case ast.Attribute(attr="bfloat16" | "float16" | "float32" as dtype):
                return dtype
            case ast.Call(func=function, args=args, keywords=[]) if (name := ast.unparse(function)) in _CALLS:
                return _CALLS[name](*map(self.read, args))
            case ast.Call(func=function) if ast.unparse(function).endswith(ASSUMED):
                return True
        raise self.unread(node)


def _returns(node: ast.stmt) -> bool:
    return any(isinstance(inner, ast.Return) and inner.value for inner in ast.walk(node))


def _flat_dict(pairs: Sequence[tuple[ast.expr | None, ast.expr]], node: ast.expr) -> ast.Dict:
    """Return a dict whose `**` parts are merged where they are dicts of the program."""
    flat: list[tuple[ast.expr | None, ast.expr]] = []
    for key, value in pairs:
        if key is None and isinstance(value, ast.Dict):
            flat += zip(value.keys, value.values, strict=True)
        else:
            flat.append((key, value))
    return ast.Dict([key for key, _ in flat], [value for _, value in flat], lineno=node.lineno)
