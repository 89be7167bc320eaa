"""Convert scripts that call TRL's trainers or Unsloth: read as text, never imported or run."""

from __future__ import annotations

import ast
import json
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
from grpo_fast.config.foreign.rules import Absent, Rule, load_yaml, rules_of
from grpo_fast.config.foreign.syntax import Program, UnreadError
from grpo_fast.config.foreign.trl import BATCH, TEXT_PROMPTS, trl_rules, whole_groups, with_usual

_TABLE = load_yaml("script.yaml")
_RULES: dict[str, Rule] = dict(rules_of(_TABLE["arguments"]))
_BESIDES: dict[str, str] = _TABLE["calls"]
_POSITIONAL: dict[str, list[str]] = _TABLE["positional"]
_MISSING: dict[str, dict[str, Any]] = _TABLE["defaults"]
_TRAINERS = ("GRPOTrainer", "DPOTrainer")
_BY_HAND = Absent("is not converted; set it by hand", decide=True)


def read_script(path: Path, functions: str) -> Conversion:
    """Return a script's run, and the file of its functions.

    Args:
        path: a Python file, or a notebook.
        functions: the path of the file.

    Raises:
        ValueError: it is not Python, or calls no trainer.
    """
    try:
        return _Script(Program(_code(path)), path, functions).conversion()
    except RecursionError:
        raise ValueError("is nested too deeply to be read") from None


def _code(path: Path) -> str:
    """Return a script's text, or a notebook's cells, whose shell commands become `pass`."""
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

    def __init__(self, program: Program, path: Path, functions_file: str) -> None:
        self.program, self.path, self.functions_file = program, path, functions_file
        self.values: dict[str, Any] = {}  # by the names that the rules know
        self.entries: list[Entry] = []
        self.unread: set[str] = set()
        self.functions = Functions(program)
        self.readers: dict[str, Callable[[ast.expr], Any]] = {
            "model": self._model,
            "quantization_config": self._nested,
            "peft_config": self._nested,
            "vllm_sampling_params": self._nested,
            **dict.fromkeys(("processing_class", "tokenizer"), self._tokenizer),
            "train_dataset": partial(self._dataset, "dataset"),
            "eval_dataset": partial(self._dataset, "evaluation.dataset"),
            "args": self._nested,
            "reward_funcs": self._rewards,  # after `args`, which has their weights
            "tools": lambda node: self._put("tools", [self._callable(one, "tool") for one in _items(node)]),
        }

    def conversion(self) -> Conversion:
        calls = [(_name(call), call) for call in self.program.calls]
        found = [(kind, call) for name, call in calls if (kind := name.rpartition(".")[2]) in _TRAINERS]
        if not found:
            others = sorted(
                {f", but {name}, which is not converted" for name, _ in calls if "Trainer" in name}
            )
            raise ValueError(f"calls no {' or '.join(_TRAINERS)}{''.join(others)}")
        (kind, call), *more = found
        self._read_call(kind, call)
        for name, other in more:
            reason = "only the first trainer is read; write what this one changes as an entry of `stages`"
            self._decide(f"{name} (line {other.lineno})", self.program.source(other), reason)
        for name, call in calls:
            for known in (known for known in _BESIDES if f".{name}".endswith(f".{known}")):
                self.entries.append(Entry(f"{name}()", f"line {call.lineno}", Absent(_BESIDES[known])))
        for name, problem in self.functions.problems.items():
            self._decide(name, self.functions_file, problem)
        return self._converted("dpo" if kind == "DPOTrainer" else "grpo")

    def _converted(self, algorithm: Algorithm) -> Conversion:
        document = self.values | whole_groups(self.values)
        rules, notes = trl_rules(document, algorithm == "dpo")
        if sizes := self.unread & {*BATCH, "num_generations", "num_iterations"}:
            reason = f"follows from {', '.join(sorted(sizes))} too; set prompts_per_step"
            rules |= dict.fromkeys(BATCH, Absent(reason, decide=True))
        entries = [TEXT_PROMPTS]
        for entry in self.entries:
            rule = rules.get(entry.key) if entry.rule is None else entry.rule
            entries.append(replace(entry, rule=rule, note=entry.note or notes.get(entry.key, "")))
        unknown = {*self.unread, *(["num_train_epochs"] if "max_steps" in self.unread else [])}
        usual = with_usual(DEFAULTS, document).items()
        defaults = {key: value for key, value in usual if key not in unknown}
        siblings = {"use_peft": False, **document}
        found = convert_entries("TRL", entries, siblings, rules, defaults, algorithm=algorithm)
        text = self.functions.text(self.path.name)
        return replace(found, source=self.path.name, files={self.functions_file: text} if text else {})

    # What becomes of a value

    def _put(self, name: str, value: Any, rule: Rule | None = None) -> None:
        self.values[name] = value
        self.entries.append(Entry(name, value, rule))

    def _decide(self, name: str, value: Any, reason: object) -> None:
        self.entries.append(Entry(name, value, Absent(str(reason), decide=True)))

    def _arguments(self, kind: str, call: ast.Call) -> dict[str, ast.expr]:
        given, problems = self.program.arguments(call, _POSITIONAL.get(kind, ()))
        for problem in problems:
            self._decide(kind, self.program.source(call), problem)
        return given

    def _read_call(self, kind: str, call: ast.Call) -> None:
        """Take the arguments of a call, and what missing ones mean there."""
        given = self._arguments(kind, call)
        self._take(kind, given)
        fast = kind == "from_pretrained" and "Fast" in _name(call)
        for key, value in _MISSING.get("Fast" if fast else kind, {}).items():
            widths = {"load_in_8bit", "load_in_16bit", "full_finetuning"} if fast else {"peft_config"}
            if not given.keys() & {key, *widths}:
                name = f"{kind}.{key}"
                rule = _RULES.get(name) or NAMES[key]
                self.entries.append(Entry(name, value, rule, "the library's default", missing=True))

    def _take(self, kind: str, given: dict[str, ast.expr], dataset: str = "dataset") -> None:
        """Take arguments by their readers and rules; what cannot be read is to decide."""
        of_trl = kind.startswith(("GRPO", "DPO"))
        for key in sorted(given, key=[*self.readers, *given].index):
            name, node = key if of_trl else f"{kind}.{key}", given[key]
            rule = _RULES.get(f"{kind}.{key}") or (None if of_trl else NAMES.get(key, _BY_HAND))
            if isinstance(rule, str):
                rule = re.sub(r"^dataset\b", dataset, rule)
            try:
                if self.program.source(node).strip("[]").endswith(".eos_token"):
                    self.entries.append(Entry(name, key, Absent("a completion ends there anyway")))
                elif key in self.readers:
                    self.readers[key](node)
                elif key in _POSITIONAL["from_pretrained"]:
                    self._put("model_name_or_path", self.program.read(node))
                elif key == "split" and {*self.program.read(node)} & {*"[]+"}:
                    self._decide(name, self.program.read(node), "takes some of the rows; set dataset.size")
                else:
                    self._put(name, self.program.read(node), rule)
            except (ValueError, TypeError) as reason:
                self.unread.add(name)
                known = NAMES.get(key) if rule is None else rule
                if not isinstance(known, Absent):
                    known = Absent(
                        f"{reason}; set {known}" if isinstance(known, str) else str(reason), decide=True
                    )
                self.entries.append(Entry(name, self.program.source(node), known))

    def _call(self, node: ast.expr) -> tuple[ast.Call, str]:
        """Return the call that makes a value, or a tuple with it, and its kind."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            node = node.value
        if not isinstance(node, ast.Call):
            raise self.program.unread(node)
        return node, _name(node).rpartition(".")[2]

    def _nested(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and node.value is None:
            return
        call, kind = self._call(node)
        if kind not in ("BitsAndBytesConfig", "LoraConfig", "SamplingParams", "GRPOConfig", "DPOConfig"):
            raise self.program.unread(node, "makes it; set it by hand")
        self._read_call(kind, call)

    def _model(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant | ast.BinOp | ast.JoinedStr):
            self._put("model_name_or_path", self.program.read(node))
            return
        call, kind = self._call(node)
        if kind in ("to", "cuda", "eval", "train") and isinstance(call.func, ast.Attribute):
            self._model(call.func.value)
        elif kind in ("from_pretrained", "get_peft_model", "prepare_model_for_kbit_training"):
            self._read_call(kind, call)
        else:
            raise self.program.unread(node, "makes it; set model.path")
        self.functions.policy[id(call)] = self.values.get("model_name_or_path", "FILL_IN")

    def _tokenizer(self, node: ast.expr) -> None:
        call, kind = self._call(node)
        if id(call) in self.functions.policy:
            return
        path = self._arguments(kind, call).get("pretrained_model_name_or_path")
        if path is None:
            raise self.program.unread(node, "makes it; set model.tokenizer")
        if (value := self.program.read(path)) != self.values.get("model_name_or_path"):
            self._put("processing_class", value, "model.tokenizer")

    # Functions

    def _callable(self, node: ast.expr, hint: str) -> str:
        """Return `file.py:name` or `module.name` for a function of the script, whose text is kept."""
        text = ""
        match node:
            case ast.Name(id=name) if name in self.program.statements:
                self.functions.add(name)
                return f"{self.functions_file}:{name}"
            case ast.Name() | ast.Attribute() if "." in (dotted := self.program.source(node)).strip("."):
                module, _, name = dotted.rpartition(".")
                file = self.path.parent / f"{module.lstrip('.')}.py"
                return f"{file}:{name}" if file.is_file() else dotted
            case ast.Lambda():
                text = f"def NAME({ast.unparse(node.args)}):\n    return {ast.unparse(node.body)}"
            case ast.Call() if "from_pretrained" not in _name(node):
                text = f"NAME = {ast.unparse(node)}"
        if not text:
            raise self.program.unread(node, "is no function of the script; write one, and name that")
        return f"{self.functions_file}:{self.functions.define(hint, text)}"

    def _rewards(self, node: ast.expr) -> None:
        weights, paths = self.values.get("reward_weights") or [], {}
        for index, one in enumerate(_items(node)):
            try:
                is_text = isinstance(one, ast.Constant)
                path = self.program.read(one) if is_text else self._callable(one, f"reward_{index + 1}")
                reward(str(path))  # raises what is refused about this one
                paths[index] = str(path)
            except ValueError as reason:
                self._decide(f"reward_funcs.{index}", self.program.source(one), reason)
        if weights and max(paths, default=-1) < len(weights):
            self.values["reward_weights"] = [weights[index] for index in paths]
        if paths:
            self._put("reward_funcs", [*paths.values()])

    # Data

    def _dataset(self, key: str, node: ast.expr) -> None:
        """Take a dataset by its source and the methods that are called on it in turn."""
        methods: list[tuple[str, Any]] = []
        while True:
            match node:
                case ast.Constant(value=None):
                    return
                case ast.Subscript(value=inner, slice=part):
                    methods.insert(0, ("split", part))
                case ast.Call(func=ast.Attribute(value=inner, attr=name)) if f"methods.{name}" in _RULES:
                    methods.insert(0, (name, node))
                case _:
                    break
            node = inner
        try:
            self._source(key, node)
        except UnreadError as reason:
            self._decide(f"{key}.source", self.program.source(node), reason)
        steps = [name for name, _ in methods if name in ("map", "rename_column")]
        for name, call in methods:
            shown, text = f"{key}.{name}", self.program.source(call)[-80:]
            if name == "split":
                self._take("load_dataset", {"split": call}, key)
            elif len(steps) > 1 and name in steps:
                self._decide(shown, text, "is one of several; write one function of a row, for one `map`")
            elif name == "map":
                given = self._arguments(name, call)
                function = self._callable(given.pop("function", call), "make_row")
                self._put(shown, import_path(function), f"{key}.transform")
                self._take("map", given)
            elif name == "rename_column":
                old, new = (self.program.read(one) for one in self._arguments(name, call).values())
                self._put(shown, {old: new}, f"{key}.rename")
            elif name == "select" and (size := _first_rows(call)) is not None:
                self._put(shown, self.program.read(size), f"{key}.size")
            else:
                self.entries.append(Entry(shown, text, _RULES[f"methods.{name}"]))
        if key != "dataset" and not steps and "dataset.map" in self.values:
            self.entries.append(Entry(f"{key}.map", None, lambda *_: {f"{key}.transform": None}, "as it is"))

    def _source(self, key: str, node: ast.expr) -> None:
        call, kind = self._call(node)
        if kind not in ("load_dataset", "load_from_disk", "from_json", "from_csv", "from_parquet"):
            raise self.program.unread(node, "makes the rows; write them as a JSONL file")
        given = self._arguments(kind, call)
        path = given.pop(_POSITIONAL[kind][0], node)
        if "data_files" in given and self.program.read(path) in ("json", "csv", "parquet"):
            path = given.pop("data_files")
            if "split" in given and "[" not in str(self.program.read(given["split"])):
                del given["split"]  # whose name only the files have
        value = self.program.read(path)
        if isinstance(value, dict) and len(value) == 1:
            (value,) = value.values()
        if not isinstance(value, str):
            raise self.program.unread(node, "reads several files; write the rows as one")
        self._put(f"{key}.source", value, f"{key}.source")
        self._take("load_dataset", given, key)


def _name(call: ast.Call) -> str:
    """Return the dotted name of what is called, or the name of a method."""
    whole = ast.unparse(call.func)
    return whole if re.fullmatch(r"[\w.]+", whole) else getattr(call.func, "attr", "")


def _items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]


def _first_rows(call: ast.Call) -> ast.expr | None:
    """Return the number of rows that `select(range(number))` keeps."""
    match call.args:
        case [ast.Call(func=ast.Name(id="range"), args=[number], keywords=[])]:
            return number
    return None
