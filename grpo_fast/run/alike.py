"""What has to be alike: settings, code and data of all ranks, and of a resumed run and its checkpoint."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_fast.config.load import load_config
from grpo_fast.config.lookup import OBJECT_MARK
from grpo_fast.config.record import CONFIG_FILE, INPUTS_DIR
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked
from grpo_fast.config.section import short
from grpo_fast.config.tree import differences
from grpo_fast.distributed.world import World
from grpo_fast.record.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import METRICS_FILE
from grpo_fast.record.report import REPORT_FILE

# What a resumed run may do differently and still be the same run: what follows from today's device, and the
# rate, for one that has diverged.
CHANGEABLE = (
    *("output_dir", "max_steps", "threads", "checkpoint", "logging", "alerts", "callbacks", "hub"),
    *("memory", "distributed"),
    *("micro_batch_tokens", "model.gradient_checkpointing", "rollout.vllm", "optimizer.learning_rate"),
)
_CHANGEABLE = tuple(f"{name}." for name in CHANGEABLE)
# As `Inputs.name` writes it.
OBJECT = re.compile(rf"([\w.]+:.+){OBJECT_MARK}([0-9a-f]{{16}}|no source)(\+\d+)?")
_IMPORT_PATH = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*")


def require_alike(world: World, what: str, own: Callable[[], Mapping[str, Any]]) -> None:
    """Raises ValueError where a rank has another tree than rank 0; the message names it and a difference."""
    if world.size == 1:
        return
    first, *others = world.gather_from_all(what, own)
    for rank, other in enumerate(others, 1):
        for key, value, here in differences(first, other):
            there, at_first = (short(masked(one, key)) for one in (here, value))
            raise ValueError(
                f"{what} of rank {rank} is not that of rank 0: {key} is {there} there, and {at_first} on "
                "rank 0; give all ranks the same files and settings"
            )


def find_checkpoint(
    run_dir: Path,
    store: CheckpointStore,
    config: TrainConfig,
    resume: str | None,
    code: Mapping[str, str],
    *,
    changed_code: bool,
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to continue from, and what has changed since, a sentence for each key and file of code.

    There is no checkpoint for a new run, nor for one that was stopped before its first. The latter may go on
    with any configuration: nothing that it has trained is kept.
    """
    earlier = run_dir / CONFIG_FILE
    if resume is None:
        if store.paths() or any(record["step"] for record in read_jsonl(run_dir / METRICS_FILE)):
            raise CheckpointError(
                f"output_dir = {str(run_dir)!r} already holds a run; continue it with --resume (from Python: "
                "resume=True), or choose another"
            )
        return None, []
    if not earlier.exists():
        raise CheckpointError(
            f"output_dir = {str(run_dir)!r} holds no run to resume; start it without --resume, or name the "
            "folder that the run has been moved to in the place of its configuration"
        )
    checkpoint = store.load_latest() if resume == "latest" else store.load(resume)
    if checkpoint is None:
        steps = max((record["step"] for record in read_jsonl(run_dir / METRICS_FILE)), default=0)
        every = load_config(earlier).checkpoint.every
        if steps and (steps > every > 0 or (run_dir / REPORT_FILE).exists()):
            raise CheckpointError(
                f"{run_dir / METRICS_FILE} has {steps} steps, and {store.root} no checkpoint of them, of "
                "which one was saved: bring it back, or start anew in another output_dir"
            )
        return None, []
    if checkpoint.path.resolve().parent != store.root.resolve():
        raise CheckpointError(f"{resume} is a checkpoint of another run than output_dir = {str(run_dir)!r}")
    if checkpoint.step > config.max_steps:
        raise CheckpointError(
            f"max_steps = {config.max_steps}, and {checkpoint.path} has more: raise max_steps, or resume "
            "from an earlier checkpoint"
        )
    # Another secret is no other run: the saved one is hidden.
    before, now = (
        masked(one.model_dump(mode="json"), variables=False) for one in (load_config(earlier), config)
    )
    saved = checkpoint.state.get("code", {})
    edited = [f"{place} has changed" for place in code if saved.get(place, code[place]) != code[place]]
    changes: dict[str, str] = {}
    for key, old, new in differences(before, now):
        if same_object(old, new) and not is_changeable(key):
            edited.append(f"{key} = {new!r} has changed")
        elif not same_input(old, new):
            changes[key] = f"{key} was {short(old)}, is {short(new)}"
    if refused := [text for key, text in changes.items() if not is_changeable(key)]:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was started with another configuration ({'; '.join(refused)}): "
            f"resume it with its own ({earlier}), or start a new run in another output_dir"
        )
    if edited and not changed_code:
        raise CheckpointError(
            f"{checkpoint.path} was trained with other code ({'; '.join(edited)}): bring back what it was, "
            "or go on with what is there by --changed-code (from Python: changed_code=True)"
        )
    return checkpoint, [*(text for key, text in changes.items() if key != "output_dir"), *edited]


def is_changeable(key: str) -> bool:
    """Whether a resumed run may have another value of a dotted key."""
    return f"{key}.".startswith(_CHANGEABLE)


def same_object(old: Any, new: Any) -> bool:
    """Whether two names are of one object of a Python program, whose source is another."""
    name, other = (OBJECT.fullmatch(str(one)) for one in (old, new))
    return name is not None and other is not None and name[1] == other[1]


def same_input(old: Any, new: Any) -> bool:
    """Whether two paths lead to the same rows in a run's folder that has moved: names there hold a digest."""
    ends = [Path(one).parts[-2:] if isinstance(one, str) else () for one in (old, new)]
    return ends[0] == ends[1] and ends[0][:1] == (INPUTS_DIR,)


def code_digests(tree: Any) -> dict[str, str]:
    """The SHA-256 of each file of code that a configuration's import paths lead to, by module or path.

    With what these import in turn, as far as it is the user's own: libraries have versions. A file that is
    not there is left out, for loading it says so.
    """
    found: dict[str, str] = {}

    def add(place: str, imported: bool) -> None:
        file = None if place in found else _code_file(place, imported)
        if file is not None:
            source = file.read_bytes()
            found[place] = hashlib.sha256(source).hexdigest()
            package = place if file.name == "__init__.py" else place.rpartition(".")[0]
            for name in _imported_names(source, package):
                add(name, imported=True)

    def walk(value: Any) -> None:
        if isinstance(value, Mapping | list):
            for item in value.values() if isinstance(value, Mapping) else value:
                walk(item)
        elif isinstance(value, str) and (path := _IMPORT_PATH.fullmatch(value)):
            add(path[1], imported=False)

    walk(tree)
    return found


def _code_file(place: str, imported: bool) -> Path | None:
    """The source of a module or path; None where it is not there, and of imported libraries."""
    if place.endswith(".py"):
        file = Path(place).expanduser()
        return file if file.is_file() else None
    top, parent = place.partition(".")[0], place.rpartition(".")[0]
    if top in sys.stdlib_module_names or top == "grpo_fast":
        return None
    try:
        if parent and not getattr(importlib.util.find_spec(parent), "submodule_search_locations", None):
            return None  # an object in a module, which would be imported to look for a module in it
        spec = importlib.util.find_spec(place)
    except Exception:  # a user's package may raise anything
        return None
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        return None
    installed = {"site-packages", "dist-packages"} & {*Path(str(spec.origin)).parts}
    return None if imported and installed else Path(str(spec.origin))


def _imported_names(source: bytes, package: str) -> Iterator[str]:
    """What the import statements of a module may name: modules, and objects in them."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError):  # which importing it tells
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
