"""Training scripts that call TRL's trainers or Unsloth: read as text, never imported or run."""

from __future__ import annotations

import ast
import json
import math
import re
import textwrap
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.config.foreign.conversion import Conversion, Entry, ForeignKey, convert_entries
from grpo_fast.config.foreign.functions import Functions
from grpo_fast.config.foreign.names import DEFAULTS, NAMES, reward
from grpo_fast.config.foreign.rules import Absent, Places, Rule, Siblings, load_yaml, rules_of
from grpo_fast.config.foreign.syntax import Binding, Expression, Program, Scope, UnreadError
from grpo_fast.config.foreign.trl import BATCH, TEXT_PROMPTS, trl_rules, whole_groups, with_usual

_TABLE = load_yaml("script.yaml")
_CALLS: dict[str, str] = _TABLE["calls"]
_RULES: dict[str, Rule] = dict(rules_of(_TABLE["arguments"]))
_HEAD = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
TRAINERS = {
    "GRPOTrainer": (*_HEAD, "reward_processing_classes", "callbacks", "optimizers", "peft_config"),
    "DPOTrainer": (
        *("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
        *("processing_class", "compute_metrics", "callbacks", "optimizers"),
    ),
}
# What a call takes by position.
POSITIONAL = {
    "LoraConfig": ("task_type", "peft_type"),
    "get_peft_model": ("model", "r", "target_modules", "lora_alpha", "lora_dropout"),
    "load_dataset": ("path", "name", "data_dir", "data_files", "split"),
    "map": ("function",),
}
# What a missing argument of LoRA means there; Unsloth's modules are all linear ones.
LORA_DEFAULTS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 8, "lora_alpha": 8, "target_modules": None},
    "get_peft_model": {"r": 16, "lora_alpha": 16, "use_gradient_checkpointing": "unsloth"},
}
LOADED_AS = ("prepare_model_for_kbit_training", "to", "cuda", "eval", "train", "half", "bfloat16", "float")
FILES = ("json", "csv", "parquet")
_FIRST_ROWS = re.compile(r"([^\[\]]+)\[:(\d+)\]")


def read_script(path: Path, functions: str, rows: str) -> Conversion:
    """Return a script's run, with the files that go with it.

    Args:
        functions, rows: where its functions, and rows that it writes down, are to be.

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
        self.read: dict[str, Any] = {}  # value by the name that the rules know
        self.fields: list[tuple[str, str, Any, str]] = []  # name shown, name of the rule, value, note
        self.unread: dict[str, tuple[str, str]] = {}  # rule's name: text and reason
        self.rules: dict[str, Rule] = {}
        self.further: list[Entry] = []
        self.policy: dict[int, str] = {}
        self.functions = Functions(program, self.policy)
        self.files: dict[str, str] = {}
        self.named: dict[int, str] = {}  # the function that was written for an expression

    def conversion(self) -> Conversion:
        calls = [(call, self._trainer(call)) for call in self.program.calls]
        trainers = sorted(((call, kind) for call, kind in calls if kind), key=lambda found: found[0].lineno)
        if not trainers:
            others = {self.program.dotted(call.func).rpartition(".")[2] for call, _ in calls}
            known = ", ".join(sorted(name for name in others if name.endswith("Trainer")))
            raise ValueError(
                f"calls no {' or '.join(TRAINERS)}"
                + (f", but {known}, which is not converted" if known else "")
            )
        (call, kind), *more = trainers
        for other, _ in more:
            reason = "only the first trainer is read; write what this one changes as an entry of `stages`"
            self._decide(f"{kind} (line {other.lineno})", self.program.source(other), reason)
        self._trainer_call(call, kind)
        self._besides()
        return self._converted(preference=kind == "DPOTrainer")

    def _trainer(self, call: ast.Call) -> str:
        """Return which trainer a call makes, also of a class that derives from it; else nothing."""
        name = self.program.dotted(call.func).rpartition(".")[2]
        if name in TRAINERS:
            return name
        derived = self.program.definition(call.func, self.program.module)
        bases = derived.bases if isinstance(derived, ast.ClassDef) else []
        names = [self.program.dotted(base).rpartition(".")[2] for base in bases]
        return next((base for base in names if base in TRAINERS), "")

    def _trainer_call(self, call: ast.Call, kind: str) -> None:
        scope = self._around(call)
        name = self.program.dotted(call.func).rpartition(".")[2]
        if name != kind:
            reason = f"{kind} with methods of its own: see loss.loss_type, rollout.function, callbacks"
            self._decide(name, f"line {call.lineno}", reason)
        given = self._arguments(Expression(call, scope), TRAINERS[kind], kind)
        readers: dict[str, Callable[[Expression], None]] = {
            "model": self._model,
            "args": partial(self._config, kind.removesuffix("Trainer") + "Config"),
            "peft_config": self._lora,
            "processing_class": self._tokenizer,
            "tokenizer": self._tokenizer,
            "train_dataset": partial(self._dataset, "dataset"),
            "eval_dataset": partial(self._dataset, "evaluation.dataset"),
            "callbacks": self._callbacks,
            "quantization_config": self._quantization,
        }
        for argument in sorted(given, key=[*readers, *given].index):  # the model before its tokenizer
            place = given[argument]
            try:
                if argument == "reward_funcs":
                    continue  # after `args`, which has their weights
                if argument in readers:
                    readers[argument](place)
                elif argument in ("tools", "environment_factory"):
                    end = self.program.follow(place)
                    parts = end.node.elts if isinstance(end.node, ast.List | ast.Tuple) else None
                    paths = [self._callable(Expression(p, end.scope), "tool") for p in parts or ()]
                    self._put(
                        argument, argument, paths if parts is not None else self._callable(place, "tool")
                    )
                else:
                    self._take(argument, argument, place)
            except UnreadError as reason:
                self._leave(argument, argument, place, str(reason))
        if "reward_funcs" in given:
            try:
                self._rewards(given["reward_funcs"])
            except UnreadError as reason:
                self._leave("reward_funcs", "reward_funcs", given["reward_funcs"], str(reason))

    def _around(self, call: ast.Call) -> Scope:
        """Return the names where a trainer is made: the module's, or those of a function as it is called."""
        program, scope = self.program, self.program.module
        for node in ast.walk(program.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and call in ast.walk(node):
                entries = [
                    c for c in program.calls if isinstance(c.func, ast.Name) and c.func.id == node.name
                ]
                scope = program.enter(node, entries[0] if len(entries) == 1 else None, program.module)
        return scope

    # What becomes of a value

    def _put(self, shown: str, name: str, value: Any, note: str = "") -> None:
        self.read[name] = value
        self.fields.append((shown, name, value, note))

    def _take(self, shown: str, name: str, place: Expression) -> None:
        try:
            self._put(shown, name, *self.program.read(place))
        except UnreadError as reason:
            self._leave(shown, name, place, str(reason))

    def _leave(self, shown: str, name: str, place: Expression, reason: str) -> None:
        self.unread[name] = (self.program.source(place.node), reason)
        self.fields.append((shown, name, ..., ""))

    def _decide(self, shown: str, value: Any, reason: str) -> None:
        self.further.append(Entry(shown, value, Absent(reason, decide=True)))

    def _arguments(self, place: Expression, names: tuple[str, ...], shown: str) -> dict[str, Expression]:
        found, problems = self.program.arguments(place, names)
        for reason in problems:
            self._decide(shown, self.program.source(place.node), reason)
        return found

    def _call(self, place: Expression) -> tuple[Expression, str]:
        """Return the call that an expression leads to, and its name."""
        end = self.program.follow(place)
        if not isinstance(end.node, ast.Call):
            raise UnreadError(f"line {end.node.lineno}: {self.program.source(end.node)} is no call to read")
        dotted = self.program.dotted(end.node.func)
        return end, dotted or getattr(end.node.func, "attr", "")

    # The arguments of a trainer

    def _config(self, kind: str, place: Expression) -> None:
        end, name = self._call(place)
        if not name.endswith(kind):
            raise UnreadError(f"line {end.node.lineno}: {name}() decides on it; convert its YAML by itself")
        given = self._arguments(end, ("output_dir",), kind)
        if isinstance(place.node, ast.Name):
            changed = [one for one in place.scope.attributes if one[0] == place.node.id]
            given |= {key: Expression(value, place.scope) for _, key, value in changed}
        for key, value in given.items():
            if key == "vllm_sampling_params":
                self._each("SamplingParams", self._call(value)[0], ())
            else:
                self._take(key, key, value)

    def _each(
        self, call: str, place: Expression, leave: tuple[str, ...], also: Rule | None = None
    ) -> dict[str, Expression]:
        """Take the arguments of a call by their rules, and return all of them."""
        given = self._arguments(place, POSITIONAL.get(call, ()), call)
        for key, value in given.items():
            if key not in leave:
                shown = f"{call}.{key}"
                if key == "stop" and re.fullmatch(
                    r"\[?[\w.]+\.eos_token\]?", self.program.source(value.node)
                ):
                    ends = Absent("a completion ends at the tokenizer's end token anyway")
                    self.further.append(Entry(shown, self.program.source(value.node), ends))
                    continue
                if shown not in _RULES and key in NAMES and key in (*BITS, "stop"):
                    self._take(shown, key, value)
                    continue
                self.rules.setdefault(shown, _RULES.get(shown) or _one_option(key, also))
                self._take(shown, shown, value)
        return given

    def _model(self, place: Expression) -> None:
        end = self.program.follow(place)
        if not isinstance(end.node, ast.Call):
            self._take("model", "model_name_or_path", place)
            return
        end, name = self._call(place)
        call = name.rpartition(".")[2]
        assert isinstance(end.node, ast.Call)
        self.policy[id(end.node)] = ""
        if call == "from_pretrained":
            self._loaded(end, name)
        elif call == "get_peft_model" and "Fast" not in name:
            given = self._arguments(end, ("model", "peft_config"), call)
            self._model(given["model"])
            self._lora(given["peft_config"])
        elif call == "get_peft_model":
            given = self._each(call, end, ("model", "lora_alpha"))
            self._model(given["model"])
            self._scale(call, given)
        elif call in LOADED_AS:
            is_method = isinstance(end.node.func, ast.Attribute) and call != LOADED_AS[0]
            inner = end.node.func.value if is_method and isinstance(end.node.func, ast.Attribute) else None
            self._model(Expression(inner or end.node.args[0], end.scope))
        else:
            raise UnreadError(f"line {end.node.lineno}: {name}() makes it; set model.path")

    def _loaded(self, place: Expression, name: str) -> None:
        """The arguments of `from_pretrained`."""
        keys = ("pretrained_model_name_or_path", "model_name")
        given = self._arguments(place, keys[:1], "from_pretrained")
        path = next((given.pop(key) for key in keys if key in given), None)
        if path is None:
            raise UnreadError(f"line {place.node.lineno}: from_pretrained has no name")
        self._take("from_pretrained", "model_name_or_path", path)
        if isinstance(self.read.get("model_name_or_path"), str):
            self.policy[id(place.node)] = (
                f"AutoTokenizer.from_pretrained({self.read['model_name_or_path']!r})"
            )
        options = NAMES["model_init_kwargs"]
        for key, value in given.items():
            shown = f"from_pretrained.{key}"
            if key == "quantization_config":
                self._quantization(value)
            elif shown in _RULES:
                self.rules[shown] = _RULES[shown]
                self._take(shown, shown, value)
            elif key in BITS:
                self._take(shown, key, value)
            else:
                self.rules[shown] = _one_option(key, options)
                self._take(shown, shown, value)
        is_16_bit = given.keys() & {"load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning"}
        if "Fast" in name and not is_16_bit:
            rule = NAMES["load_in_4bit"]
            self.further.append(Entry("from_pretrained.load_in_4bit", True, rule, "Unsloth's default", True))

    def _quantization(self, place: Expression) -> None:
        end, _ = self._call(place)
        for key, value in self._arguments(end, (), "BitsAndBytesConfig").items():
            self._take(f"BitsAndBytesConfig.{key}", key, value)

    def _lora(self, place: Expression) -> None:
        if isinstance(place.node, ast.Constant) and place.node.value is None:
            return
        end, name = self._call(place)
        if not name.endswith("LoraConfig"):
            raise UnreadError(f"line {end.node.lineno}: {name}() decides on it; set model.lora")
        self._scale("LoraConfig", self._each("LoraConfig", end, ("lora_alpha",)))

    def _scale(self, call: str, given: Mapping[str, Expression]) -> None:
        """`lora_alpha`, and what LoRA's missing arguments mean."""
        alpha = f"{call}.lora_alpha"
        self.rules[alpha] = _alpha
        if "lora_alpha" in given:
            self._take(alpha, alpha, given["lora_alpha"])
        for key, value in LORA_DEFAULTS[call].items():
            if key not in given:
                shown = f"{call}.{key}"
                note = "peft's default" if call == "LoraConfig" else "Unsloth's default"
                self.further.append(Entry(shown, value, self.rules.get(shown) or _RULES[shown], note, True))

    def _tokenizer(self, place: Expression) -> None:
        end, name = self._call(place)
        assert isinstance(end.node, ast.Call)
        if end.index is None:
            if not name.endswith(".from_pretrained"):
                raise UnreadError(f"line {end.node.lineno}: {name}() makes it; set model.tokenizer")
            given = self._arguments(end, ("pretrained_model_name_or_path",), "processing_class")
            value, note = self.program.read(given["pretrained_model_name_or_path"])
            if value != self.read.get("model_name_or_path"):
                self.rules["processing_class"] = "model.tokenizer"
                self._put("processing_class", "processing_class", value, note)
        for owner, key, value in place.scope.attributes:
            if isinstance(place.node, ast.Name) and owner == place.node.id:
                shown = f"{owner}.{key}"
                padding = Absent("nothing is padded, and the end of a completion is the tokenizer's")
                self.rules[shown] = "model.chat_template" if key == "chat_template" else padding
                self._take(shown, shown, Expression(value, place.scope))

    def _callbacks(self, place: Expression) -> None:
        end = self.program.follow(place)
        for node in end.node.elts if isinstance(end.node, ast.List | ast.Tuple) else [end.node]:
            self._decide("callbacks", self.program.source(node), "derive a class from grpo_fast.Callback")

    # Functions

    def _callable(self, place: Expression, hint: str) -> str:
        """Return `file.py:name` or `module:name` for a function of the script; keep its text."""
        node, scope = place.node, place.scope
        if isinstance(node, ast.Name):
            found, home = scope.find(node)
            if isinstance(found, Expression):
                return self._callable(found, hint)
            if isinstance(found.statement, ast.Import | ast.ImportFrom):
                return self._imported(node)
            if isinstance(found.value, ast.Name | ast.Attribute) and found.index is None:
                return self._callable(Expression(found.value, home), hint)
            if isinstance(found.value, ast.Constant):
                raise UnreadError(f"line {node.lineno}: {node.id} is no function")
            self._no_model(found, node)
            self.functions.add(node.id, scope)
            return f"{self.to}:{node.id}"
        if isinstance(node, ast.Attribute) and self.program.dotted(node):
            return self._imported(node)
        if isinstance(node, ast.Lambda | ast.Call):
            self._no_model(Binding(ast.Expr(node), node), node)
            text = f"NAME = {self._whole(node)}"
            if isinstance(node, ast.Lambda):
                body = textwrap.indent(f"return {self._whole(node.body)}", "    ")
                text = f"def NAME({ast.unparse(node.args)}):\n{body}"
            if id(node) not in self.named:
                self.named[id(node)] = self.functions.define(hint, text, scope)
            return f"{self.to}:{self.named[id(node)]}"
        raise UnreadError(f"line {node.lineno}: {self.program.source(node)} is no function of the script")

    def _whole(self, node: ast.expr) -> str:
        """Return the text of an expression that may take several lines, indented as at the left margin."""
        text = self.program.segment(node)
        if "\n" not in text:
            return text
        inner = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
        if any(part.lineno != part.end_lineno for part in inner):
            return ast.unparse(node)  # whose text would change with its indentation
        first, rest = text.split("\n", 1)
        line = self.program.lines[node.lineno - 1]
        margin = line[: len(line) - len(line.lstrip())]
        rest = textwrap.dedent(f"{margin}|\n{rest}").partition("\n")[2]
        return f"{first}\n{rest}" if text[0] in "{[(" else f"(\n{first}\n{rest}\n)"

    def _no_model(self, found: Binding, node: ast.expr) -> None:
        called = found.value.func if isinstance(found.value, ast.Call) else None
        if called is not None and self.program.dotted(called).endswith(".from_pretrained"):
            raise UnreadError(f"line {node.lineno}: is a model; call it inside a function, and name that")

    def _imported(self, node: ast.expr) -> str:
        module, _, name = self.program.dotted(node).rpartition(".")
        if module.startswith(".") or not module:
            raise UnreadError(
                f"line {node.lineno}: {self.program.source(node)} is of another file; name it here"
            )
        file = self.path.parent / f"{module}.py"
        return f"{file}:{name}" if file.is_file() else f"{module}.{name}"

    def _rewards(self, place: Expression) -> None:
        weights = self.read.get("reward_weights") or []
        paths, kept = [], []
        for index, one in enumerate(self._listed(place)):
            shown = f"reward_funcs.{index}"
            try:
                end = self.program.follow(one)
                if isinstance(end.node, ast.Constant | ast.JoinedStr):
                    path = str(self.program.read(end)[0])
                else:
                    path = self._callable(one, f"reward_{index + 1}")
                reward(path)  # is refused by itself
            except ValueError as reason:
                self._decide(shown, self.program.source(one.node), str(reason))
                continue
            paths.append(path)
            kept.append(index)
        if weights and len(weights) > max(kept, default=0):
            self.read["reward_weights"] = [weights[index] for index in kept]
        if paths:
            self._put("reward_funcs", "reward_funcs", paths)

    def _listed(self, place: Expression) -> list[Expression]:
        """Return the parts of a list that is written down, or the one that stands for it."""
        end = self.program.follow(place)
        if isinstance(end.node, ast.List | ast.Tuple):
            return [Expression(part, end.scope) for part in end.node.elts]
        if isinstance(end.node, ast.BinOp) and isinstance(end.node.op, ast.Add):
            sides = (end.node.left, end.node.right)
            return [one for side in sides for one in self._listed(Expression(side, end.scope))]
        if isinstance(end.node, ast.ListComp | ast.Subscript):
            raise UnreadError(f"line {end.node.lineno}: {self.program.source(end.node)} decides on them")
        return [place]

    # Data

    def _dataset(self, key: str, place: Expression) -> None:
        """A dataset by its source, and the methods that are called on it in turn."""
        methods: list[tuple[str, Expression]] = []
        while True:
            end = self.program.follow(place)
            node = end.node
            if isinstance(node, ast.Subscript):
                methods.append(("split", Expression(node.slice, end.scope)))
                place = Expression(node.value, end.scope)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and (f"methods.{node.func.attr}" in _RULES or node.func.attr in _STEPS)
            ):
                methods.append((node.func.attr, end))
                place = Expression(node.func.value, end.scope)
            else:
                break
        if isinstance(node, ast.Constant) and node.value is None:
            return
        try:
            self._source(key, end)
        except UnreadError as reason:
            self._decide(f"{key}.source", self.program.source(end.node), str(reason))
        steps: list[tuple[str, Any]] = []
        for method, at in reversed(methods):
            if method == "split":
                self._split(key, at)
            elif method == "map":
                given = self._each("map", at, ("function", "fn_kwargs"))
                options = self.program.read(given["fn_kwargs"])[0] if "fn_kwargs" in given else {}
                steps.append(("map", (given.get("function"), options)))
            elif method in ("rename_column", "rename_columns"):
                steps.append(("rename", self._renamed(at)))
            else:
                shuffled = any(
                    before == "shuffle" for before, _ in methods[methods.index((method, at)) + 1 :]
                )
                self._method(
                    key, method, at, "the script takes others, which it shuffles" if shuffled else ""
                )
        self._transform(key, steps)

    def _method(self, key: str, method: str, at: Expression, note: str) -> None:
        call = at.node
        assert isinstance(call, ast.Call)
        number = call.args[0] if call.args else None
        if (
            method == "select"
            and isinstance(number, ast.Call)
            and self.program.dotted(number.func) == "range"
        ):
            number = number.args[0] if len(number.args) == 1 else None
        elif method != "take":
            number = None
        if number is not None:
            value, rests_on = self.program.read(Expression(number, at.scope))
            self.rules[f"{key}.{method}"] = f"{key}.size"
            note = "; ".join(filter(None, (rests_on, note)))
            self._put(f"{key}.{method}", f"{key}.{method}", value, note and f"the first rows; {note}")
        else:
            shown = ", ".join(
                self.program.source(part) for part in (*call.args, *(k.value for k in call.keywords))
            )
            self.further.append(
                Entry(f"{key}.{method}", shown or f"line {call.lineno}", _RULES[f"methods.{method}"])
            )

    def _split(self, key: str, at: Expression) -> None:
        name, note = self.program.read(at)
        self._put_split(key, f"{key}.split", name, note)

    def _put_split(self, key: str, shown: str, name: Any, note: str) -> None:
        if isinstance(name, str) and (first := _FIRST_ROWS.fullmatch(name)):
            self.further.append(
                Entry(shown, name, lambda *_: {f"{key}.split": first[1], f"{key}.size": int(first[2])})
            )
        elif not isinstance(name, str) or "[" in name or "+" in name:
            self._decide(shown, name, "takes other rows than the first ones; write them as a file")
        else:
            self.rules[shown] = f"{key}.split"
            self._put(shown, shown, name, note)

    def _source(self, key: str, place: Expression) -> None:
        end, dotted = self._call(place)
        call, at = dotted.rpartition(".")[2], f"{key}.source"
        self.rules[at] = at
        if call == "load_dataset":
            given = self._arguments(end, POSITIONAL["load_dataset"], call)
            path = self.program.read(given.pop("path"))[0]
            files = given.pop("data_files", None)
            split = given.pop("split", None)
            if path in FILES and files is not None:
                self._put("load_dataset.data_files", at, self._file(files, split))
                split = None
            else:
                self._put("load_dataset", at, path)
            for name, value in given.items():
                shown = f"load_dataset.{name}"
                rule = _RULES.get(shown) or Absent("is not a key that this converter knows", decide=True)
                self.rules[f"{key}.{name}"] = f"{key}.name" if name == "name" else rule
                self._take(shown, f"{key}.{name}", value)
            if split is not None:
                self._put_split(
                    key,
                    "load_dataset.split" if key == "dataset" else f"{key}.split",
                    *self.program.read(split),
                )
        elif call in (
            "from_json",
            "from_csv",
            "from_parquet",
            "load_from_disk",
            "read_csv",
            "read_json",
            "read_parquet",
        ):
            given = self._arguments(end, ("path",), call)
            path = next(
                (
                    given.pop(name)
                    for name in ("path", "path_or_paths", "filepath_or_buffer", "path_or_buf", "dataset_path")
                    if name in given
                ),
                None,
            )
            if path is None:
                raise UnreadError(f"line {end.node.lineno}: {call} has no path")
            self._take(call, at, path)
            for name, value in given.items():
                if name not in ("split", "lines", "orient", "keep_in_memory"):
                    self._decide(
                        f"{call}.{name}",
                        self.program.source(value.node),
                        "has no place here; write the rows as a JSONL file",
                    )
        elif call == "from_pandas":
            self._source(key, self._arguments(end, ("df",), call)["df"])
        elif call in ("from_list", "from_dict"):
            given = self._arguments(end, ("mapping",), call)
            rows = self.program.read(given["mapping"])[0]
            if isinstance(rows, dict):
                rows = [dict(zip(rows, row, strict=False)) for row in zip(*rows.values(), strict=False)]
            file = self.rows_to if key == "dataset" else self.rows_to.replace("_rows", "_eval_rows")
            self.files[file] = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            self._put(f"{call}", at, file)
        else:
            raise UnreadError(
                f"line {end.node.lineno}: {dotted}() makes the rows; write them as a JSONL file"
            )

    def _file(self, files: Expression, split: Expression | None) -> Any:
        """Return the one file of `data_files`."""
        found = self.program.read(files)[0]
        if isinstance(found, dict):
            wanted = self.program.read(split)[0] if split is not None else "train"
            found = found.get(wanted)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if not isinstance(found, str):
            raise UnreadError(f"line {files.node.lineno}: a run reads one file; join them")
        return found

    def _renamed(self, at: Expression) -> dict[str, str]:
        given = self._arguments(at, ("original_column_name", "new_column_name"), "rename_column")
        values = [self.program.read(value)[0] for value in given.values()]
        return values[0] if isinstance(values[0], dict) else {values[0]: values[1]}

    def _transform(self, key: str, steps: list[tuple[str, Any]]) -> None:
        """`.map` and `.rename_column` in turn: one function, or renamed columns where that is all."""
        if not any(kind == "map" for kind, _ in steps):
            renames: dict[str, str] = {}
            for _, names in steps:
                renames |= names
            if renames:
                self.rules[f"{key}.rename_column"] = f"{key}.rename"
                self._put(f"{key}.rename_column", f"{key}.rename_column", renames)
            return
        lines, scope, path = [], self.program.module, ""
        for kind, step in steps:
            if kind == "rename":
                moved = ", ".join(f"{new!r}: row[{old!r}]" for old, new in step.items())
                lines.append(f"row = {{**row, {moved}}}")
                continue
            function, options = step
            try:
                if function is None:
                    raise UnreadError("map has no function")
                path = self._callable(function, "make_row")
            except UnreadError as reason:
                self._decide(
                    f"{key}.map", self.program.source(function.node) if function else "", str(reason)
                )
                continue
            file, _, name = path.rpartition(":")
            if file == self.to:
                call = f"{name}(row{', **' + repr(options) if options else ''})"
                lines.append(f"row = {{**row, **{call}}}")
            elif len(steps) > 1 or options:
                self._decide(f"{key}.map", path, "is of another module; call it in the function that is kept")
        if len(steps) > 1 or (steps[0][1][1] and lines):
            code = "\n    ".join(["def NAME(row):", *lines, "return row"])
            path = f"{self.to}:{self.functions.define('transform', code, scope)}"
        if path:
            module, dot, name = path.rpartition(".") if ":" not in path else (path, "", "")
            self.rules[f"{key}.map"] = f"{key}.transform"
            self._put(f"{key}.map", f"{key}.map", f"{module}:{name}" if dot else path)

    # The account

    def _besides(self) -> None:
        """What the script does around the training, and what its functions lack."""
        seen = set()
        for call in self.program.calls:
            dotted = self.program.dotted(call.func) or getattr(call.func, "attr", "")
            known = next((name for name in _CALLS if f".{dotted}".endswith(f".{name}")), "")
            if known and dotted not in seen:
                seen.add(dotted)
                self.further.append(Entry(f"{dotted}()", f"line {call.lineno}", Absent(_CALLS[known])))
        for line, rests_on in self.program.decided.items():
            self.further.append(Entry(f"if, {line}", rests_on, Absent("its first part is what was read")))
        for name, note in self.functions.notes.items():
            self.further.append(Entry(name, self.to, Absent(f"stands there by {note}")))
        for name, reason in self.functions.problems.items():
            self._decide(name, self.to, reason)

    def _converted(self, *, preference: bool) -> Conversion:
        document = self.read | whole_groups(self.read)
        rules, notes = trl_rules(document, preference)
        rules |= self.rules
        if sizes := self.unread.keys() & {*BATCH, "num_generations", "num_iterations"}:
            lacking = Absent(
                f"follows from {', '.join(sorted(sizes))} too; set prompts_per_step", decide=True
            )
            rules |= dict.fromkeys(BATCH, lacking)
        entries = []
        for shown, name, value, note in self.fields:
            rule = rules.get(name)
            if name in self.unread and value is ...:
                value, reason = self.unread[name]
                if not isinstance(rule, Absent) or rule.decide:
                    place = f"; set {rule}" if isinstance(rule, str) else ""
                    rule = Absent(reason + place, decide=True)
            entries.append(Entry(shown, value, rule, "; ".join(filter(None, (note, notes.get(name, ""))))))
        entries += [TEXT_PROMPTS, *self.further]
        defaults = with_usual(DEFAULTS, document)
        unknown = {*self.unread, *(["num_train_epochs"] if "max_steps" in self.unread else [])}
        defaults = {key: value for key, value in defaults.items() if key not in unknown}
        siblings = {"use_peft": False, **document}
        found = convert_entries("TRL", entries, siblings, rules, defaults, preference=preference)
        if self.functions:
            self.files[self.to] = self.functions.text(self.path.name)
        rows = [
            ForeignKey(
                name,
                "***",
                "taken",
                reason=f"looks like a secret and stands in {self.to}; read it from a variable",
            )
            for name in self.functions.secrets
        ]
        return replace(found, source=self.path.name, rows=(*found.rows, *rows), files=self.files)


BITS = ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")
_STEPS = ("map", "rename_column", "rename_columns")


def _one_option(key: str, rule: Rule | None) -> Rule:
    """The rule of one option by that of a mapping of options."""
    if rule is None or isinstance(rule, str | Absent):
        return Absent("is not an option that this converter knows", decide=True)
    return lambda value, siblings: rule({key: value}, siblings)


def _alpha(value: Any, siblings: Siblings) -> Places:
    """Rank-stabilised LoRA scales by alpha / sqrt(r)."""
    call = next(
        key.partition(".")[0] for key in (*siblings, "LoraConfig.") if key.partition(".")[0] in LORA_DEFAULTS
    )
    rank = siblings.get(f"{call}.r") or LORA_DEFAULTS[call]["r"]
    return {"model.lora.alpha": value * math.sqrt(rank) if siblings.get(f"{call}.use_rslora") else value}
