"""Training scripts that call TRL's trainers or Unsloth: read as text, never imported or run."""

from __future__ import annotations

import ast
import json
import math
import re
import tokenize
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.config.foreign.conversion import Algorithm, Conversion, Entry, convert_entries
from grpo_fast.config.foreign.functions import Functions
from grpo_fast.config.foreign.names import DEFAULTS, NAMES, import_path, reward
from grpo_fast.config.foreign.rules import Absent, Places, Rule, Siblings, load_yaml, rules_of
from grpo_fast.config.foreign.syntax import Expression, Function, Program, Scope, UnreadError
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
_BY_HAND = "decides on it; set it by hand"


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
        self.fields: list[tuple[str, str, Any]] = []  # name shown, name of the rule, value
        self.unread: dict[str, str] = {}  # the rule's name, and why
        self.rules: dict[str, Rule] = {f"{call}.lora_alpha": partial(_scaled, call) for call in LORA_DEFAULTS}
        self.further: list[Entry] = []
        self.policy: dict[int, str] = {}
        self.functions = Functions(program, self.policy)
        self.files: dict[str, str] = {}
        self.readers: dict[str, Callable[[Expression], None]] = {
            "model": self._model,
            **dict.fromkeys(_POSITIONAL["from_pretrained"], self._path),
            "quantization_config": partial(self._nested, ("BitsAndBytesConfig",)),
            "peft_config": partial(self._nested, ("LoraConfig",)),
            "vllm_sampling_params": partial(self._nested, ("SamplingParams",)),
            **dict.fromkeys(("processing_class", "tokenizer"), self._tokenizer),
            "train_dataset": partial(self._dataset, "dataset"),
            "eval_dataset": partial(self._dataset, "evaluation.dataset"),
            "args": partial(self._nested, ("GRPOConfig", "DPOConfig")),
            "reward_funcs": self._rewards,  # after `args`, which has their weights
            "tools": self._tools,
        }

    def conversion(self) -> Conversion:
        names = [(call, self.program.dotted(call.func).rpartition(".")[2]) for call in self.program.calls]
        found = sorted((one for one in names if one[1] in TRAINERS), key=lambda one: one[0].lineno)
        if not found:
            others = sorted({f", but {one}, which is not converted" for _, one in names if "Trainer" in one})
            raise ValueError(f"calls no {' or '.join(TRAINERS)}{''.join(others)}")
        (call, kind), *more = found
        for other, name in more:
            reason = "only the first trainer is read; write what this one changes as an entry of `stages`"
            self._decide(f"{name} (line {other.lineno})", self.program.source(other), reason)
        self._read_call(kind, Expression(call, self._around(call)))
        for call, name in names[::-1]:
            dotted = self.program.dotted(call.func) or getattr(call.func, "attr", name)
            for known in (known for known in _BESIDES if f".{dotted}".endswith(f".{known}")):
                self.further.append(Entry(f"{dotted}()", f"line {call.lineno}", Absent(_BESIDES[known])))
        for name, problem in self.functions.problems.items():
            self._decide(name, self.to, problem)
        return self._converted(preference=kind == "DPOTrainer")

    def _around(self, call: ast.Call) -> Scope:
        """Return the names where a trainer is made: the module's, or those of a function as it is called."""
        scope = self.program.module
        for node in ast.walk(self.program.tree):
            if isinstance(node, Function) and call in ast.walk(node):
                entries = [one for one in self.program.calls if getattr(one.func, "id", "") == node.name]
                given = Expression(entries[0], self.program.module) if len(entries) == 1 else None
                scope = self.program.enter(node, given)
        return scope

    # What becomes of a value

    def _put(self, shown: str, name: str, value: Any, rule: Rule | None = None) -> None:
        self.values[name] = value
        self.fields.append((shown, name, value))
        self.rules |= {} if rule is None else {name: rule}

    def _take(self, shown: str, name: str, place: Expression) -> None:
        try:
            self._put(shown, name, self.program.read(place))
        except UnreadError as reason:
            self._leave(shown, name, place, reason)

    def _leave(self, shown: str, name: str, place: Expression, reason: Exception) -> None:
        self.unread[name] = str(reason)
        self.fields.append((shown, name, self.program.source(place.node)))

    def _decide(self, shown: str, value: Any, reason: object) -> None:
        self.further.append(Entry(shown, value, Absent(str(reason), decide=True)))

    def _arguments(self, call: str, place: Expression) -> dict[str, Expression]:
        given, problems = self.program.arguments(place, _POSITIONAL.get(call, ()))
        for problem in problems:
            self._decide(call, self.program.source(place.node), problem)
        return given

    def _read_call(self, call: str, place: Expression) -> None:
        """Take the arguments of a call by their readers and rules, and what those mean that are missing."""
        given = self._arguments(call, place)
        of_trl = call.startswith(("GRPO", "DPO"))
        for key in sorted(given, key=[*self.readers, *given].index):
            name, one = key if of_trl else f"{call}.{key}", given[key]
            if rule := _RULES.get(f"{call}.{key}") or (None if of_trl else NAMES.get(key)):
                self.rules.setdefault(name, rule)
            if self.program.source(one.node).strip("[]").endswith(".eos_token"):
                self.further.append(Entry(name, key, Absent("a completion ends there anyway")))
                continue
            try:
                self.readers.get(key, partial(self._take, name, name))(one)
            except (ValueError, TypeError) as reason:
                self._leave(name, name, one, reason)
            for change in one.scope.changes.get(one.node.id, ()) if isinstance(one.node, ast.Name) else ():
                if isinstance(change, ast.Assign) and isinstance(change.targets[0], ast.Attribute):
                    shown, value = (self.program.source(side) for side in (change.targets[0], change.value))
                    later = Absent(f"line {change.lineno} sets it later; {_BY_HAND}", decide=True)
                    rule = Absent("nothing is padded") if ".pad" in shown else later
                    self.further.append(Entry(shown, value, rule))
        for key, value in LORA_DEFAULTS.get(call, {}).items():
            if not given.keys() & {key, "peft_config"}:
                rule = self.rules.get(f"{call}.{key}") or _RULES[f"{call}.{key}"]
                self.further.append(
                    Entry(f"{call}.{key}", value, rule, "the library's default", missing=True)
                )

    def _call(self, place: Expression) -> tuple[Expression, ast.Call, str]:
        """Return the call that an expression leads to, and its name."""
        end = self.program.follow(place)
        if not isinstance(end.node, ast.Call):
            raise self.program.unread(end.node, "is no call that can be read")
        return end, end.node, self.program.dotted(end.node.func) or getattr(end.node.func, "attr", "")

    # Model, configuration and tokenizer

    def _nested(self, kinds: tuple[str, ...], place: Expression) -> None:
        if isinstance(place.node, ast.Constant) and place.node.value is None:
            return
        end, _, name = self._call(place)
        if (kind := name.rpartition(".")[2]) not in kinds:
            raise self.program.unread(end.node, _BY_HAND)
        self._read_call(kind, end)

    def _model(self, place: Expression) -> None:
        if not isinstance(self.program.follow(place).node, ast.Call):
            self._path(place)
            return
        end, node, name = self._call(place)
        call = name.rpartition(".")[2]
        if call in ("to", "cuda", "eval", "train") and isinstance(node.func, ast.Attribute):
            self._model(Expression(node.func.value, end.scope))
        elif call in ("from_pretrained", "get_peft_model", "prepare_model_for_kbit_training"):
            self._read_call(call, end)
            widths = {"load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning"}
            if call == "from_pretrained" and "Fast" in name and not {k.arg for k in node.keywords} & widths:
                missing = ("from_pretrained.load_in_4bit", True, NAMES["load_in_4bit"], "Unsloth's default")
                self.further.append(Entry(*missing, missing=True))
        else:
            raise self.program.unread(end.node, "makes it; set model.path")
        path = self.values.get("model_name_or_path", "FILL_IN")
        self.policy[id(node)] = f"AutoTokenizer.from_pretrained({path!r})"

    def _path(self, place: Expression) -> None:
        self._take("model", "model_name_or_path", place)

    def _tokenizer(self, place: Expression) -> None:
        end, node, name = self._call(place)
        if id(node) in self.policy:
            return
        path = self._arguments("from_pretrained", end).get("pretrained_model_name_or_path")
        if path is None or not name.endswith(".from_pretrained"):
            raise self.program.unread(end.node, "makes it; set model.tokenizer")
        if (value := self.program.read(path)) != self.values.get("model_name_or_path"):
            self._put("processing_class", "processing_class", value, "model.tokenizer")

    # Functions

    def _callable(self, place: Expression, hint: str) -> str:
        """Return `file.py:name` or `module.name` for a function of the script, whose text is kept."""
        node, scope = place.node, place.scope
        if isinstance(node, ast.Name):
            found, home = scope.find(node)
            if isinstance(found, Expression):
                return self._callable(found, hint)
            if not isinstance(found.statement, ast.Import | ast.ImportFrom):
                if isinstance(found.value, ast.Name | ast.Attribute):
                    return self._callable(Expression(found.value, home), hint)
                if isinstance(found.value, ast.Call) and "from_pretrained" in self._call(place)[2]:
                    raise self.program.unread(node, "is a model; call it inside a function, and name that")
                self.functions.add(node.id, scope)
                return f"{self.to}:{node.id}"
        if dotted := self.program.dotted(node):
            module, _, name = dotted.rpartition(".")
            if module.startswith(".") or not module:
                raise self.program.unread(node, "is of another file; name it here")
            file = self.path.parent / f"{module}.py"
            return f"{file}:{name}" if file.is_file() else dotted
        if not isinstance(node, ast.Lambda | ast.Call):
            raise self.program.unread(node, "is no function of the script")
        text = f"NAME = {ast.unparse(node)}"
        if isinstance(node, ast.Lambda):
            text = f"def NAME({ast.unparse(node.args)}):\n    return {ast.unparse(node.body)}"
        return f"{self.to}:{self.functions.define(hint, text, scope)}"

    def _listed(self, place: Expression) -> list[Expression]:
        """Return the parts of a list that is written down, or the one that stands for it."""
        end = self.program.follow(place)
        if isinstance(end.node, ast.List | ast.Tuple):
            return [Expression(part, end.scope) for part in end.node.elts]
        if isinstance(end.node, ast.BinOp | ast.ListComp | ast.Subscript):
            raise self.program.unread(end.node, _BY_HAND)
        return [place]

    def _tools(self, place: Expression) -> None:
        self._put("tools", "tools", [self._callable(one, "tool") for one in self._listed(place)])

    def _rewards(self, place: Expression) -> None:
        weights, paths = self.values.get("reward_weights") or [], {}
        for index, one in enumerate(self._listed(place)):
            try:
                is_text = isinstance(self.program.follow(one).node, ast.Constant)
                path = self.program.read(one) if is_text else self._callable(one, f"reward_{index + 1}")
                reward(str(path))  # is refused by itself
                paths[index] = str(path)
            except ValueError as reason:
                self._decide(f"reward_funcs.{index}", self.program.source(one.node), reason)
        if weights and max(paths, default=-1) < len(weights):
            self.values["reward_weights"] = [weights[index] for index in paths]
        if paths:
            self._put("reward_funcs", "reward_funcs", [*paths.values()])

    # Data

    def _dataset(self, key: str, place: Expression) -> None:
        """Take a dataset by its source and the methods that are called on it in turn."""
        methods: list[tuple[str, Expression]] = []
        while True:
            end = self.program.follow(place)
            match end.node:
                case ast.Subscript(value=inner, slice=part):
                    methods.insert(0, ("split", Expression(part, end.scope)))
                case ast.Call(func=ast.Attribute(value=inner, attr=name)) if f"methods.{name}" in _RULES:
                    methods.insert(0, (name, end))
                case ast.Constant(value=None):
                    return
                case _:
                    break
            place = Expression(inner, end.scope)
        try:
            self._source(key, end)
        except UnreadError as reason:
            self._decide(f"{key}.source", self.program.source(end.node), reason)
        steps: list[Expression | dict[str, str]] = []  # functions, and renamed columns
        for method, at in methods:
            shown = f"{key}.{method}"
            match at.node:
                case _ if method == "split":
                    self._split(key, at)
                case ast.Call(args=[ast.Call(ast.Name("range"), [number])]) if method == "select":
                    self._put(shown, shown, self.program.read(Expression(number, at.scope)), f"{key}.size")
                case ast.Call() if method == "map":
                    given = self._arguments("map", at)
                    steps += [given.pop(name) for name in ("function",) if name in given]
                    for name, one in given.items():
                        rule = _RULES.get(f"map.{name}") or Absent(_BY_HAND, decide=True)
                        self.rules[f"map.{name}"] = rule
                        self._take(f"map.{name}", f"map.{name}", one)
                case ast.Call() if method == "rename_column":
                    old, new = (self.program.read(one) for one in self._arguments(method, at).values())
                    steps.append({old: new})
                case _:
                    text = self.program.source(at.node)[-80:]
                    self.further.append(Entry(shown, text, _RULES[f"methods.{method}"]))
        self._transform(key, steps)

    def _split(self, key: str, place: Expression) -> None:
        name = self.program.read(place)
        if isinstance(name, str) and not {*name} & {*"[]+"}:
            self._put(f"{key}.split", f"{key}.split", name, f"{key}.split")
        else:
            self._decide(f"{key}.split", name, "takes some of the rows; set dataset.size")

    def _source(self, key: str, place: Expression) -> None:
        end, _, dotted = self._call(place)
        call, at = dotted.rpartition(".")[2], f"{key}.source"
        if call not in _POSITIONAL:
            raise self.program.unread(end.node, "makes the rows; write them as a JSONL file")
        given = self._arguments(call, end)
        path = given.pop(_POSITIONAL[call][0], None)
        if path is None:
            raise self.program.unread(end.node, "has no source")
        if call in ("from_list", "from_dict"):
            rows = self.program.read(path)
            if isinstance(rows, dict):
                rows = [dict(zip(rows, row, strict=False)) for row in zip(*rows.values(), strict=False)]
            file = self.rows_to.format(key.replace(".", "_"))
            self.files[file] = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            self._put(call, at, file, at)
            return
        if "data_files" in given and self.program.read(path) in ("json", "csv", "parquet"):
            path = given.pop("data_files")
            if "split" in given and "[" not in str(self.program.read(given["split"])):
                del given["split"]  # whose name only the files have
        if "split" in given:
            self._split(key, given.pop("split"))
        value = self.program.read(path)
        if isinstance(value, dict) and len(value) == 1:
            (value,) = value.values()
        if not isinstance(value, str):
            raise self.program.unread(end.node, "reads several files; write the rows as one")
        self._put(call, at, value, at)
        for name, one in given.items():
            rule = _RULES.get(f"{call}.{name}") or Absent(_BY_HAND, decide=True)
            self.rules[f"{key}.{name}"] = f"{key}.name" if name == "name" else rule
            self._take(f"{call}.{name}", f"{key}.{name}", one)

    def _transform(self, key: str, steps: list[Expression | dict[str, str]]) -> None:
        """Take `.map` and `.rename_column` in turn: one function, or renamed columns where that is all."""
        place, shown, path = f"{key}.transform", f"{key}.map", ""
        lines: list[str] = []
        renames: dict[str, str] = {}
        for step in steps:
            if isinstance(step, dict):
                renames |= step
                moved = ", ".join(f"{new!r}: row[{old!r}]" for old, new in step.items())
                lines.append(f"row = {{**row, {moved}}}")
                continue
            try:
                path = import_path(self._callable(step, "make_row"))
            except UnreadError as reason:
                self._decide(shown, self.program.source(step.node), reason)
                continue
            module, _, name = path.rpartition(":")
            if module != self.to and len(steps) > 1:
                self._decide(shown, path, "is of another module; call it in a function of the script")
            lines.append(f"row = {{**row, **{name}(row)}}")
        if path and len(steps) > 1:
            code = "\n    ".join(["def NAME(row):", *lines, "return row"])
            path = f"{self.to}:{self.functions.define('transform', code, self.program.module)}"
        if path:
            self._put(shown, shown, path, place)
        elif renames:
            self._put(f"{key}.rename_column", f"{key}.rename_column", renames, f"{key}.rename")
        elif key != "dataset" and "dataset.map" in self.values:
            self.further.append(Entry(shown, None, lambda *_: {place: None}, "rows as they are"))

    # The account

    def _converted(self, *, preference: bool) -> Conversion:
        document = self.values | whole_groups(self.values)
        rules, notes = trl_rules(document, preference)
        rules |= self.rules
        if sizes := self.unread.keys() & {*BATCH, "num_generations", "num_iterations"}:
            reason = f"follows from {', '.join(sorted(sizes))} too; set prompts_per_step"
            rules |= dict.fromkeys(BATCH, Absent(reason, decide=True))
        entries = []
        for shown, name, value in self.fields:
            rule = rules.get(name)
            if name in self.unread and not isinstance(rule, Absent):
                place = f"; set {rule}" if isinstance(rule, str) else ""
                rule = Absent(self.unread[name] + place, decide=True)
            entries.append(Entry(shown, value, rule, notes.get(name, "")))
        unknown = {*self.unread, *(["num_train_epochs"] if "max_steps" in self.unread else [])}
        usual = with_usual(DEFAULTS, document).items()
        defaults = {key: value for key, value in usual if key not in unknown}
        entries += [TEXT_PROMPTS, *self.further]
        siblings = {"use_peft": False, **document}
        algorithm: Algorithm = "dpo" if preference else "grpo"
        found = convert_entries("TRL", entries, siblings, rules, defaults, algorithm=algorithm)
        if self.functions:
            self.files[self.to] = self.functions.text(self.path.name)
        return replace(found, source=self.path.name, files=self.files)


def _scaled(call: str, value: Any, siblings: Siblings) -> Places:
    """Rank-stabilised LoRA scales by alpha / sqrt(r)."""
    rank = siblings.get(f"{call}.r") or LORA_DEFAULTS[call]["r"]
    return {"model.lora.alpha": value * math.sqrt(rank) if siblings.get(f"{call}.use_rslora") else value}
