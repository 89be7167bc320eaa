"""Check that all ranks, and a resumed run and its checkpoint, have the same settings and code."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_fast.config.keys import without_positions
from grpo_fast.config.load import load_config
from grpo_fast.config.lookup import importing_from
from grpo_fast.config.paths import user_path, with_absolute_paths
from grpo_fast.config.record import CONFIG_FILE
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked
from grpo_fast.config.section import short
from grpo_fast.config.tree import differences, with_leaves
from grpo_fast.distributed.world import World
from grpo_fast.record.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import METRICS_FILE
from grpo_fast.record.report import REPORT_FILE

logger = logging.getLogger(__name__)

# Keys that a resumed run may change: what follows from the device, what only decides whether a failing or
# hanging call ends the run, and the learning rate, for a run that has diverged.
CHANGEABLE = (
    *("output_dir", "max_steps", "threads", "checkpoint", "logging", "alerts", "callbacks", "hub"),
    *("memory", "distributed", "model.head", "rollout.max_batch_tokens", "rollout.tool_timeout"),
    *("rewards.timeout", "rewards.on_error", "rewards.options.time_limit"),
    *("micro_batch_tokens", "model.gradient_checkpointing", "rollout.vllm", "optimizer.learning_rate"),
)
_CHANGEABLE = tuple(f"{name}." for name in CHANGEABLE)
_IMPORT_PATH = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*")


def require_alike(world: World, what: str, own: Callable[[], Mapping[str, Any]]) -> None:
    """Raise ValueError where a rank's tree differs from rank 0's; the message names the first difference."""
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
    run_dir: Path, store: CheckpointStore, config: TrainConfig, resume: str | None, code: Mapping[str, str]
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to continue from, or None, and a sentence for each key that has changed since.

    A new run has none. A run that stopped before its first checkpoint has none, and may change any setting.
    """
    if resume is None:
        return None, []
    earlier = run_dir / CONFIG_FILE
    if not earlier.exists():
        raise CheckpointError(
            f"output_dir = {str(run_dir)!r} holds no run to resume; start it without --resume, or name the "
            "folder that the run has been moved to in the place of its configuration"
        )
    trusted = {"model.trust_remote_code": config.model.trust_remote_code}
    before = with_absolute_paths(load_config(run_dir, trusted))
    newest = resume == "latest" or Path(resume).resolve() == run_dir.resolve()
    checkpoint = store.load_latest() if newest else store.load(resume)
    if checkpoint is None:
        steps = max((record["step"] for record in read_jsonl(run_dir / METRICS_FILE)), default=0)
        if steps > before.checkpoint.every > 0 or (steps and (run_dir / REPORT_FILE).exists()):
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
    # Masked, as the saved file hides secrets: another secret does not make another run.
    trees = (masked(one.model_dump(mode="json"), variables=False) for one in (before, config))
    changes: list[str] = []
    refused: list[str] = []
    for key, old, new in differences(*trees):
        allowed = is_changeable(key) or _has_moved(old, new)
        (changes if allowed else refused).append(f"{key} was {short(old)}, is {short(new)}")
    if refused:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was started with another configuration ({'; '.join(refused)}): "
            f"resume it with its own ({earlier}), or start a new run in another output_dir"
        )
    _warn_of_lost_steps(run_dir / METRICS_FILE, checkpoint)
    saved = checkpoint.state.get("code", {})
    for place in (place for place in code if saved.get(place, code[place]) != code[place]):
        logger.warning("%s has changed since %s was saved; the run goes on with it", place, checkpoint.path)
    return checkpoint, [change for change in changes if not change.startswith("output_dir was")]


def is_changeable(key: str) -> bool:
    """Return whether a resumed run may change a dotted key, also in a stage."""
    return f"{without_positions(key).removeprefix('stages.overrides.')}.".startswith(_CHANGEABLE)


def _has_moved(old: Any, new: Any) -> bool:
    """Return whether a file or folder was moved: the old path is gone, and the new one has its name."""
    if not (isinstance(old, str) and isinstance(new, str) and old.startswith("/")):
        return False
    before, now = (path.rpartition(":")[0] if ".py:" in path else path for path in (old, new))
    same = old.removeprefix(str(Path(before).parent)) == new.removeprefix(str(Path(now).parent))
    return same and Path(now).exists() and not Path(before).exists()


def _warn_of_lost_steps(metrics: Path, checkpoint: Checkpoint) -> None:
    counts = Counter(record["step"] for record in read_jsonl(metrics))
    lost = [step for step in range(checkpoint.step + 1) if not counts[step]]
    repeated = [step for step, count in counts.items() if count > 1 and step <= checkpoint.step]
    for problem, steps in {"lacks": lost, "repeats": repeated}.items():
        if steps:
            listed = f"{', '.join(map(str, steps[:5]))}{', ...' if len(steps) > 5 else ''}"
            logger.warning(
                "%s %s %d of the %d steps before %s (%s): the run's curves and report are wrong there; "
                "restore the file",
                *(metrics, problem, len(steps), checkpoint.step + 1, checkpoint.path.name, listed),
            )


def code_digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each file that an import path in the tree names, by its module or path."""
    places: list[str] = []

    def note(leaf: Any) -> None:
        if found := _IMPORT_PATH.fullmatch(str(leaf)):
            places.append(found[1])

    with_leaves(tree, note)
    files = {place: _code_file(place) for place in places}
    return {place: hashlib.sha256(file.read_bytes()).hexdigest() for place, file in files.items() if file}


def _code_file(place: str) -> Path | None:
    """Return the source file of a module or path, or None where there is none."""
    if place.endswith(".py"):
        file = user_path(place)
        return file if file.is_file() else None
    with suppress(Exception, SystemExit):  # this imports a user's package
        with importing_from(Path.cwd()):
            spec = importlib.util.find_spec(place)
        if spec is not None and str(spec.origin).endswith(".py"):
            return Path(str(spec.origin))
    return None
