"""Training scripts that call TRL's trainers or Unsloth: read as text, never imported or run."""

from __future__ import annotations

import ast
import json
import math
import re
import textwrap
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.config.foreign.conversion import Conversion, Entry, convert_entries
from grpo_fast.config.foreign.functions import Functions
from grpo_fast.config.foreign.names import DEFAULTS, NAMES, import_path, reward
from grpo_fast.config.foreign.rules import Absent, Places, Rule, Siblings, load_yaml, rules_of
from grpo_fast.config.foreign.syntax import LARGEST, Expression, Program, Scope, UnreadError
from grpo_fast.config.foreign.trl import BATCH, TEXT_PROMPTS, trl_rules, whole_groups, with_usual

_TABLE = load_yaml("script.yaml")
_RULES: dict[str, Rule] = dict(rules_of(_TABLE["arguments"]))
_BESIDES: dict[str, str] = _TABLE["calls"]
_POSITIONAL: dict[str, list[str]] = _TABLE["positional"]
TRAINERS = ("GRPOTrainer", "DPOTrainer")
# What a missing argument of LoRA means there. Unsloth's modules are all linear ones.
LORA_DEFAULTS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 8, "lora_alpha": 8, "target_modules": None},
    "get_peft_model": {"r": 16, "lora_alpha": 16, "use_gradient_checkpointing": "unsloth"},
}
_MOVES = ("to", "cuda", "eval", "train")  # methods that return the model
_MOST_REWARDS, _MOST_ROWS = 100, 10_000
_FIRST_ROWS = re.compile(r"([^\[\]+]+)\[:(\d+)\]")


def read_script(path: Path, functions: str, rows: str) -> Conversion:
    """Return a script's run, with the files that go with it.

    Args:
        path: a Python file, or a notebook.
        functions: where its functions are to be.
        rows: where rows that it writes down are to be, with `{}` for the dataset's name.

    Raises:
        ValueError: it is no Python, or calls no trainer.
    """
    try:
        return _Script(Program(_code(path)), path, functions, rows).conversion()
    except RecursionError:
        raise ValueError("is nested too deeply to be read") from None


def _code(path: Path) -> str:
    """Return a script's text, or a notebook's cells, whose commands for the shell become `pass`."""
    try:
        if path.suffix != ".ipynb":
            with tokenize.open(path) as file:
                return file.read()
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, SyntaxError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    sources = [source for source in sources if not re.match(r"\s*%%(?!capture|time)", source)]
    return re.sub(r"(?m)^(\s*)[!%].*$", r"\1pass", "\n".join(sources))


class _Script:
    """One script, and what has been read of it."""

    def __init__(self, program: Program, path: Path, functions: str, rows: str) -> None:
        self.program, self.path, self.to, self.rows_to = program, path, functions, rows
        self.values: dict[str, Any] = {}  # by the names that the rules know
        self.fields: list[tuple[str, str, Any, str]] = []  # name shown, name of the rule, value, note
        self.unread: dict[str, str] = {}  # the rule's name, and why
        self.rules: dict[str, Rule] = {}
        self.further: list[Entry] = []
        self.policy: dict[int, str] = {}
        self.functions = Functions(program, self.policy)
        self.files: dict[str, str] = {}
        self.named: dict[int, str] = {}  # the function that was written for an expression

    def conversion(self) -> Conversion:
        found = [(call.lineno, call, kind) for call in self.program.calls if (kind := self._trainer(call))]
        if not found:
            others = {self.program.dotted(call.func).rpartition(".")[2] for call in self.program.calls}
            known = [f", but {name}, which is not converted" for name in others if name.endswith("Trainer")]
            raise ValueError(f"calls no {' or '.join(TRAINERS)}{''.join(sorted(known))}")
        (_, call, kind), *more = sorted(found, key=lambda one: one[0])
        for line, other, name in more:
            reason = "only the first trainer is read; write what this one changes as an entry of `stages`"
            self._decide(f"{name} (line {line})", self.program.source(other), reason)
        self._read_trainer(call, kind)
        self._read_besides()
        return self._converted(preference=kind == "DPOTrainer")

    def _trainer(self, call: ast.Call) -> str:
        """Return which trainer a call makes, also of a class that derives from it; else nothing."""
        derived = self.program.definition(call.func, self.program.module)
        makers = [call.func, *(derived.bases if isinstance(derived, ast.ClassDef) else [])]
        names = [self.program.dotted(maker).rpartition(".")[2] for maker in makers]
        return next((name for name in names if name in TRAINERS), "")

    def _read_trainer(self, call: ast.Call, kind: str) -> None:
        given = self._arguments(Expression(call, self._around(call)), kind)
        if not self.program.dotted(call.func).endswith(kind):
            reason = f"{kind} with methods of its own: see loss.loss_type, rollout.function, callbacks"
            self._decide(self.program.source(call.func), f"line {call.lineno}", reason)
        readers: dict[str, Callable[[Expression], object]] = {
            "model": self._model,
            "args": partial(self._config, kind.removesuffix("Trainer") + "Config"),
            "peft_config": self._lora,
            "quantization_config": self._quantization,
            **dict.fromkeys(("processing_class", "tokenizer"), self._tokenizer),
            "train_dataset": partial(self._dataset, "dataset"),
            "eval_dataset": partial(self._dataset, "evaluation.dataset"),
            "reward_funcs": self._rewards,  # after `args`, which has their weights
            **{name: partial(self._tools, name) for name in ("tools", "environment_factory")},
        }
        for name in sorted(given, key=[*readers, *given].index):
            if name == "callbacks":
                for one in self._listed(given[name]):
                    self._decide(name, self.program.source(one.node), "derive one from grpo_fast.Callback")
                continue
            try:
                readers.get(name, partial(self._take, name, name))(given[name])
            except (ValueError, TypeError) as reason:  # of a library's call that would fail, too
                self._leave(name, name, given[name], reason)

    def _around(self, call: ast.Call) -> Scope:
        """Return the names where a trainer is made: the module's, or those of a function as it is called."""
        program, scope = self.program, self.program.module
        for node in ast.walk(program.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and call in ast.walk(node):
                entries = [one for one in program.calls if getattr(one.func, "id", "") == node.name]
                scope = program.enter(node, entries[0] if len(entries) == 1 else None, program.module)
        return scope

    # What becomes of a value

    def _put(self, shown: str, name: str, value: Any, note: str = "", rule: Rule | None = None) -> None:
        self.values[name] = value
        self.fields.append((shown, name, value, note))
        if rule is not None:
            self.rules[name] = rule

    def _take(self, shown: str, name: str, place: Expression) -> None:
        try:
            self._put(shown, name, *self.program.read(place))
        except UnreadError as reason:
            self._leave(shown, name, place, reason)

    def _leave(self, shown: str, name: str, place: Expression, reason: Exception) -> None:
        self.unread[name] = str(reason)
        self.fields.append((shown, name, self.program.source(place.node), ""))

    def _decide(self, shown: str, value: Any, reason: object) -> None:
        self.further.append(Entry(shown, value, Absent(str(reason), decide=True)))

    def _arguments(self, place: Expression, name: str) -> dict[str, Expression]:
        found, problems = self.program.arguments(place, _POSITIONAL.get(name, ()))
        for reason in problems:
            self._decide(name, self.program.source(place.node), reason)
        return found

    def _each(self, call: str, place: Expression, leave: Sequence[str] = ()) -> dict[str, Expression]:
        """Take the arguments of a call by their rules; return those to leave."""
        given = self._arguments(place, call)
        for key, value in given.items():
            shown = f"{call}.{key}"
            if key == "stop" and self.program.source(value.node).strip("[]").endswith(".eos_token"):
                self._put(
                    shown,
                    shown,
                    self.program.source(value.node),
                    rule=Absent("a completion ends there anyway"),
                )
            elif key not in leave:
                if (rule := _RULES.get(shown) or NAMES.get(key)) is not None:
                    self.rules[shown] = rule
                self._take(shown, shown, value)
        return given

    def _call(self, place: Expression) -> tuple[Expression, ast.Call, str]:
        """Return the call that an expression leads to, and its name."""
        end = self.program.follow(place)
        if not isinstance(end.node, ast.Call):
            raise self._unread(end.node, "is no call that can be read")
        return end, end.node, self.program.dotted(end.node.func) or getattr(end.node.func, "attr", "")

    def _unread(self, node: ast.expr, problem: str) -> UnreadError:
        return UnreadError(f"line {node.lineno}: {self.program.source(node)[:80]} {problem}")

    def _one_of(self, given: dict[str, Expression], place: Expression, *names: str) -> Expression:
        found = [given.pop(name) for name in names if name in given]
        if not found:
            raise self._unread(place.node, f"has no {names[0]}")
        return found[0]

    # Model, configuration and tokenizer

    def _config(self, kind: str, place: Expression) -> None:
        end, _, name = self._call(place)
        if not name.endswith(kind):
            raise self._unread(end.node, "decides on it; convert its YAML by itself")
        given = self._arguments(end, kind)
        if isinstance(place.node, ast.Name):
            changed = [one for one in place.scope.attributes if one[0] == place.node.id]
            given |= {key: Expression(value, place.scope) for _, key, value in changed}
        for key, value in given.items():
            if key == "vllm_sampling_params":
                self._each("SamplingParams", self._call(value)[0])
            else:
                self._take(key, key, value)

    def _model(self, place: Expression) -> None:
        if not isinstance(self.program.follow(place).node, ast.Call):
            self._take("model", "model_name_or_path", place)
            return
        end, node, name = self._call(place)
        call = name.rpartition(".")[2]
        self.policy[id(node)] = ""
        if call == "from_pretrained":
            names = ("pretrained_model_name_or_path", "model_name")
            given = self._each(call, end, (*names, "quantization_config"))
            if "quantization_config" in given:
                self._quantization(given["quantization_config"])
            self._take(call, "model_name_or_path", self._one_of(given, end, *names))
            if "model_name_or_path" in self.values:
                path = self.values["model_name_or_path"]
                self.policy[id(node)] = f"AutoTokenizer.from_pretrained({path!r})"
            widths = {"load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning"}
            if "Fast" in name and not given.keys() & widths:
                missing = (f"{call}.load_in_4bit", True, NAMES["load_in_4bit"], "Unsloth's default")
                self.further.append(Entry(*missing, missing=True))
        elif call == "get_peft_model" and "Fast" in name:
            given = self._each(call, end, ("model", "lora_alpha"))
            self._scale(call, given, "Unsloth's default")
            self._model(self._one_of(given, end, "model"))
        elif call in ("get_peft_model", "prepare_model_for_kbit_training"):
            given = self._arguments(end, call)
            self._model(self._one_of(given, end, "model"))
            if "peft_config" in given:
                self._lora(given["peft_config"])
        elif call in _MOVES and isinstance(node.func, ast.Attribute):
            self._model(Expression(node.func.value, end.scope))
        else:
            raise self._unread(end.node, "makes it; set model.path")

    def _quantization(self, place: Expression) -> None:
        end, _, name = self._call(place)
        if not name.endswith("BitsAndBytesConfig"):
            raise self._unread(end.node, "decides on it; set model.quantization")
        self._each("BitsAndBytesConfig", end)

    def _lora(self, place: Expression) -> None:
        if isinstance(place.node, ast.Constant) and place.node.value is None:
            return
        end, _, name = self._call(place)
        if not name.endswith("LoraConfig"):
            raise self._unread(end.node, "decides on it; set model.lora")
        self._scale("LoraConfig", self._each("LoraConfig", end, ["lora_alpha"]), "peft's default")

    def _scale(self, call: str, given: Mapping[str, Expression], note: str) -> None:
        """Take `lora_alpha`, and what LoRA's missing arguments mean."""
        alpha = f"{call}.lora_alpha"
        self.rules[alpha] = partial(_scaled, call)
        if "lora_alpha" in given:
            self._take(alpha, alpha, given["lora_alpha"])
        for key, value in LORA_DEFAULTS[call].items():
            if key not in given:
                rule = self.rules[alpha] if key == "lora_alpha" else _RULES[f"{call}.{key}"]
                self.further.append(Entry(f"{call}.{key}", value, rule, note, missing=True))

    def _tokenizer(self, place: Expression) -> None:
        end, node, name = self._call(place)
        if id(node) not in self.policy:
            if not name.endswith(".from_pretrained"):
                raise self._unread(end.node, "makes it; set model.tokenizer")
            path = self._one_of(self._arguments(end, "from_pretrained"), end, *_POSITIONAL["from_pretrained"])
            value, note = self.program.read(path)
            if value != self.values.get("model_name_or_path"):
                self._put("processing_class", "processing_class", value, note, "model.tokenizer")
        for owner, key, value in place.scope.attributes:
            if isinstance(place.node, ast.Name) and owner == place.node.id:
                shown = f"{owner}.{key}"
                padding = Absent("nothing is padded, and the end of a completion is the tokenizer's")
                self.rules[shown] = "model.chat_template" if key == "chat_template" else padding
                self._take(shown, shown, Expression(value, place.scope))

    # Functions

    def _callable(self, place: Expression, hint: str) -> str:
        """Return `file.py:name` or `module.name` for a function of the script, whose text is kept."""
        node, scope = place.node, place.scope
        if isinstance(node, ast.Name):
            found, home = scope.find(node)
            if isinstance(found, Expression):
                return self._callable(found, hint)
            if not isinstance(found.statement, ast.Import | ast.ImportFrom):
                if isinstance(found.value, ast.Name | ast.Attribute) and found.index is None:
                    return self._callable(Expression(found.value, home), hint)
                self._check_function(found.value, node)
                self.functions.add(node.id, scope)
                return f"{self.to}:{node.id}"
        if dotted := self.program.dotted(node):
            module, _, name = dotted.rpartition(".")
            if module.startswith(".") or not module:
                raise self._unread(node, "is of another file; name it here")
            file = self.path.parent / f"{module}.py"
            return f"{file}:{name}" if file.is_file() else dotted
        if not isinstance(node, ast.Lambda | ast.Call):
            raise self._unread(node, "is no function of the script")
        self._check_function(node, node)
        if id(node) not in self.named:
            text = f"NAME = {self._whole(node)}"
            if isinstance(node, ast.Lambda):
                body = textwrap.indent(f"return {self._whole(node.body)}", "    ")
                text = f"def NAME({ast.unparse(node.args)}):\n{body}"
            self.named[id(node)] = self.functions.define(hint, text, scope)
        return f"{self.to}:{self.named[id(node)]}"

    def _check_function(self, value: ast.expr | None, node: ast.expr) -> None:
        if isinstance(value, ast.Constant):
            raise self._unread(node, "is no function")
        if isinstance(value, ast.Call) and self.program.dotted(value.func).endswith(".from_pretrained"):
            raise self._unread(node, "is a model; call it inside a function, and name that")

    def _whole(self, node: ast.expr) -> str:
        """Return the text of an expression that may take several lines, as at the left margin."""
        text = self.program.segment(node)
        if "\n" not in text:
            return text
        inner = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
        if any(part.lineno != part.end_lineno for part in inner):
            return ast.unparse(node)  # a text would change with its indentation
        line = self.program.lines[node.lineno - 1]
        margin = line[: len(line) - len(line.lstrip())]
        first, _, rest = text.partition("\n")
        rest = textwrap.dedent(f"{margin}|\n{rest}").partition("\n")[2]
        return f"{first}\n{rest}" if text[0] in "{[(" else f"(\n{first}\n{rest}\n)"

    def _listed(self, place: Expression) -> list[Expression]:
        """Return the parts of a list that is written down, or the one that stands for it."""
        end = self.program.follow(place)
        match end.node:
            case ast.List(elts=parts) | ast.Tuple(elts=parts) if len(parts) <= _MOST_REWARDS:
                return [Expression(part, end.scope) for part in parts]
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return [one for side in (left, right) for one in self._listed(Expression(side, end.scope))]
            case ast.List() | ast.Tuple() | ast.ListComp() | ast.Subscript():
                raise self._unread(end.node, "decides on them")
        return [place]

    def _tools(self, name: str, place: Expression) -> None:
        paths = [self._callable(one, "tool") for one in self._listed(place)]
        self._put(name, name, paths if name == "tools" else paths[0])

    def _rewards(self, place: Expression) -> None:
        weights, paths, kept = self.values.get("reward_weights") or [], [], []
        for index, one in enumerate(self._listed(place)):
            try:
                is_text = isinstance(self.program.follow(one).node, ast.Constant)
                path = self.program.read(one)[0] if is_text else self._callable(one, f"reward_{index + 1}")
                reward(str(path))  # is refused by itself
            except ValueError as reason:
                self._decide(f"reward_funcs.{index}", self.program.source(one.node), reason)
            else:
                paths.append(str(path))
                kept += [index] if index < len(weights) else []
        if len(weights) > len(kept) == len(paths):
            self.values["reward_weights"] = [weights[index] for index in kept]
        if paths:
            self._put("reward_funcs", "reward_funcs", paths)

    # Data

    def _dataset(self, key: str, place: Expression) -> None:
        """Take a dataset by its source and the methods that are called on it in turn."""
        methods: list[tuple[str, Expression]] = []
        while True:
            end = self.program.follow(place)
            match end.node:
                case ast.Subscript(value=inner, slice=part):
                    methods.append(("split", Expression(part, end.scope)))
                case ast.Call(func=ast.Attribute(value=inner, attr=name)) if f"methods.{name}" in _RULES:
                    methods.append((name, end))
                case ast.Constant(value=None):
                    return
                case _:
                    break
            place = Expression(inner, end.scope)
        try:
            self._source(key, end)
        except UnreadError as reason:
            self._decide(f"{key}.source", self.program.source(end.node), reason)
        steps: list[tuple[Expression | None, Any]] = []  # a function and its options, or renamed columns
        for index, (method, at) in enumerate(methods[::-1]):
            shown = f"{key}.{method}"
            if method == "split":
                self._split(key, shown, at)
            elif method == "map":
                given = self._each("map", at, ("function", "fn_kwargs"))
                options = self.program.read(given["fn_kwargs"])[0] if "fn_kwargs" in given else {}
                steps.append((self._one_of(given, at, "function"), options))
            elif method.startswith("rename"):
                values = [self.program.read(one)[0] for one in self._arguments(at, method).values()]
                steps.append((None, values[0] if method == "rename_columns" else dict([values])))
            elif (number := _first_rows(method, at)) is not None:
                shuffled = any(before == "shuffle" for before, _ in methods[::-1][:index])
                told = "the first rows; the script shuffles before" if shuffled else ""
                value, note = self.program.read(number)
                self._put(shown, shown, value, "; ".join(filter(None, (note, told))), f"{key}.size")
            else:
                text = self.program.segment(at.node).rpartition(f".{method}")[2]
                self.further.append(Entry(shown, text, _RULES[f"methods.{method}"]))
        self._transform(key, steps)

    def _split(self, key: str, shown: str, place: Expression, index: int | None = None) -> None:
        name, note = self.program.read(place)
        name = name[index] if isinstance(name, list) and index is not None else name
        if first := _FIRST_ROWS.fullmatch(str(name)):
            rows = {f"{key}.split": first[1], f"{key}.size": int(first[2])}
            self._put(shown, shown, name, note, lambda *_: rows)
        elif isinstance(name, str) and not {*name} & {*"[]+"}:
            self._put(shown, shown, name, note, f"{key}.split")
        else:
            self._decide(shown, name, "takes other rows than the first ones; write them as a file")

    def _source(self, key: str, place: Expression) -> None:
        end, _, dotted = self._call(place)
        call, at = dotted.rpartition(".")[2], f"{key}.source"
        given = self._arguments(end, call) if call in _POSITIONAL else {}
        self.rules[at] = at
        if call == "load_dataset":
            path, split = self._one_of(given, end, "path"), given.pop("split", None)
            if "data_files" in given and self.program.read(path)[0] in ("json", "csv", "parquet"):
                files = self.program.read(given.pop("data_files"))[0]
                wanted = str(self.program.read(split)[0]) if split is not None else "train"
                first = _FIRST_ROWS.fullmatch(wanted)
                files = files.get(first[1] if first else wanted) if isinstance(files, dict) else files
                if isinstance(files, list):
                    files = files[0] if len(files) == 1 else None
                if not isinstance(files, str) or ("[" in wanted and not first):
                    raise self._unread(end.node, "has other rows than a file's first ones; write them as one")
                if first:
                    self._put(
                        f"{key}.split", f"{key}.split", wanted, rule=lambda *_: {f"{key}.size": int(first[2])}
                    )
                self._put(f"{call}.data_files", at, files)
            else:
                self._take(call, at, path)
                if split is not None:
                    self._split(key, f"{key}.split", split, end.index)
            for name, value in given.items():
                rule = _RULES.get(f"{call}.{name}")
                self.rules[f"{key}.{name}"] = (
                    f"{key}.name"
                    if name == "name"
                    else rule or Absent("is not an option that this converter knows", decide=True)
                )
                self._take(f"{call}.{name}", f"{key}.{name}", value)
        elif call in ("from_list", "from_dict"):
            rows = self.program.read(self._one_of(given, end, "mapping"))[0]
            if isinstance(rows, dict):
                rows = [dict(zip(rows, row, strict=False)) for row in zip(*rows.values(), strict=False)]
            file = self.rows_to.format(key.replace(".", "_"))
            lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows[:_MOST_ROWS]]
            if len(rows) > _MOST_ROWS or sum(map(len, lines)) > LARGEST:
                raise self._unread(end.node, "has too many rows to write down; write them as a JSONL file")
            self.files[file] = "".join(lines)
            self._put(call, at, file)
        elif call == "from_pandas":
            self._source(key, self._one_of(given, end, "df"))
        elif call in _POSITIONAL:
            self._take(call, at, self._one_of(given, end, *_POSITIONAL[call]))
            for name in given.keys() - {"split", "lines", "orient"}:
                reason = "has no place here; write the rows as a JSONL file"
                self._decide(f"{call}.{name}", self.program.source(given[name].node), reason)
        else:
            raise self._unread(end.node, "makes the rows; write them as a JSONL file")

    def _transform(self, key: str, steps: list[tuple[Expression | None, Any]]) -> None:
        """Take `.map` and `.rename_column` in turn: one function, or renamed columns where that is all."""
        place, shown, path = f"{key}.transform", f"{key}.map", ""
        lines: list[str] = []
        renames: dict[str, str] = {}
        for function, options in steps:
            if function is None:
                renames |= options
                moved = ", ".join(f"{new!r}: row[{old!r}]" for old, new in options.items())
                lines.append(f"row = {{**row, {moved}}}")
                continue
            try:
                path = import_path(self._callable(function, "make_row"))
            except UnreadError as reason:
                self._decide(shown, self.program.source(function.node), reason)
                continue
            module, _, name = path.rpartition(":")
            if module != self.to and (options or len(steps) > 1):
                self._decide(shown, path, "is of another module; call it in a function of the script")
                continue
            lines.append(f"row = {{**row, **{name}(row{f', **{options!r}' if options else ''})}}")
        if path and (len(steps) > 1 or steps[0][1]):
            code = "\n    ".join(["def NAME(row):", *lines, "return row"])
            path = f"{self.to}:{self.functions.define('transform', code, self.program.module)}"
        if path:
            self._put(shown, shown, path, rule=place)
        elif renames:
            self._put(f"{key}.rename_column", f"{key}.rename_column", renames, rule=f"{key}.rename")
        elif key != "dataset" and "dataset.map" in self.values:
            self.further.append(Entry(shown, None, lambda *_: {place: None}, "rows as they are"))

    # The account

    def _read_besides(self) -> None:
        """List what the script does around the training, and what its functions lack."""
        seen = set()
        for call in self.program.calls:
            dotted = self.program.dotted(call.func) or getattr(call.func, "attr", "")
            known = next((name for name in _BESIDES if f".{dotted}".endswith(f".{name}")), "")
            if known and dotted not in seen:
                seen.add(dotted)
                self.further.append(Entry(f"{dotted}()", f"line {call.lineno}", Absent(_BESIDES[known])))
        for line, rests_on in self.program.decided.items():
            self.further.append(Entry(f"if, {line}", rests_on, Absent("its branch is read so")))
        for name, note in self.functions.notes.items():
            self.further.append(Entry(name, self.to, lambda *_: {}, note))
        for name, reason in self.functions.problems.items():
            self._decide(name, self.to, reason)

    def _converted(self, *, preference: bool) -> Conversion:
        document = self.values | whole_groups(self.values)
        rules, notes = trl_rules(document, preference)
        rules |= self.rules
        if sizes := self.unread.keys() & {*BATCH, "num_generations", "num_iterations"}:
            reason = f"follows from {', '.join(sorted(sizes))} too; set prompts_per_step"
            rules |= dict.fromkeys(BATCH, Absent(reason, decide=True))
        entries = []
        for shown, name, value, note in self.fields:
            rule = rules.get(name)
            if name in self.unread and (not isinstance(rule, Absent) or rule.decide):
                place = f"; set {rule}" if isinstance(rule, str) else ""
                rule = Absent(self.unread[name] + place, decide=True)
            entries.append(Entry(shown, value, rule, "; ".join(filter(None, (note, notes.get(name))))))
        unknown = {*self.unread, *(["num_train_epochs"] if "max_steps" in self.unread else [])}
        usual = with_usual(DEFAULTS, document)
        defaults = {key: value for key, value in usual.items() if key not in unknown}
        entries += [TEXT_PROMPTS, *self.further]
        siblings = {"use_peft": False, **document}
        found = convert_entries("TRL", entries, siblings, rules, defaults, preference=preference)
        if self.functions:
            self.files[self.to] = self.functions.text(self.path.name)
        return replace(found, source=self.path.name, files=self.files)


def _first_rows(method: str, at: Expression) -> Expression | None:
    """Return how many rows `.select(range(n))` or `.take(n)` keeps."""
    match at.node:
        case ast.Call(args=[ast.Call(func=ast.Name(id="range"), args=[number])]) if method == "select":
            return Expression(number, at.scope)
        case ast.Call(args=[number]) if method == "take":
            return Expression(number, at.scope)
    return None


def _scaled(call: str, value: Any, siblings: Siblings) -> Places:
    """Rank-stabilised LoRA scales by alpha / sqrt(r)."""
    rank = siblings.get(f"{call}.r") or LORA_DEFAULTS[call]["r"]
    return {"model.lora.alpha": value * math.sqrt(rank) if siblings.get(f"{call}.use_rslora") else value}
