"""Drives a run from its configuration to its report: finds where to go on, then step after step."""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, Signals
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import dump_config, load_config
from grpo_fast.distributed.joining import awaited
from grpo_fast.distributed.world import joined
from grpo_fast.lookup import OBJECT_MARK, code_digests
from grpo_fast.plan import resolve_auto
from grpo_fast.policy.load import resolve_device
from grpo_fast.policy.random_state import restore_rng
from grpo_fast.run.build import build_callbacks, build_trainer, require_alike, with_steps
from grpo_fast.run.opening import opening_lines
from grpo_fast.run_record.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from grpo_fast.run_record.config import LoggingConfig
from grpo_fast.run_record.files import (
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    INPUTS_DIR,
    LOCK_FILE,
    differences,
    opened,
    read_jsonl,
    write_whole,
)
from grpo_fast.run_record.logs import METRICS_FILE
from grpo_fast.run_record.mirrors import require_mirrors
from grpo_fast.run_record.recorder import Recorder
from grpo_fast.run_record.report import REPORT_FILE
from grpo_fast.secrets import masked
from grpo_fast.section import short

# What a resumed run may do differently and still be the same run: what follows from today's device, and the
# rate, for one that has diverged.
CHANGEABLE = (
    *("output_dir", "max_steps", "threads", "checkpoint", "logging", "alerts", "callbacks", "hub"),
    *("memory", "distributed"),
    *("micro_batch_tokens", "model.gradient_checkpointing", "rollout.vllm", "optimizer.learning_rate"),
)
# As `Inputs.name` writes it.
OBJECT = re.compile(rf"([\w.]+:.+){OBJECT_MARK}([0-9a-f]{{16}}|no source)(\+\d+)?")
NO_FILES: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True)
class Ended:
    """A run that has trained and saved."""

    run_dir: Path
    stopped_by: Signals | None  # before its last step


def train(
    config: TrainConfig,
    *,
    resume: str | None = None,
    changed_code: bool = False,
    display: bool = True,
    files: Mapping[str, bytes] = NO_FILES,
) -> Ended:
    """Train as configured, to the last step or to the end of the step that a SIGINT, SIGTERM or SIGHUP falls
    into.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest intact checkpoint in `config.output_dir`, a path from it.
        changed_code: a resumed run may go on with rewards and the like whose code is not what it was.
        display: show progress; the files of the run are written either way.
        files: what the configuration names in the run's own directory, by name there.

    Raises:
        RunInUse: another process trains in the directory.
        OSError: the directory cannot be written to.
        CheckpointError: the directory holds another run, or has no intact checkpoint; the message names the
            remedy.
        ValueError: the configuration contradicts the model or the data. Raised before any training.
        Exception: as a step raised it, after the last finished step was saved where that is possible.
    """
    run_dir = Path(config.output_dir)
    with ExitStack() as stack:
        with awaited():
            device = resolve_device(config.model.device)
        waits = timedelta(minutes=config.distributed.timeout)
        world = stack.enter_context(joined(device, waits, config.distributed.heartbeat_timeout))
        world.from_lead("the run's folder", lambda: stack.enter_context(opened(run_dir)))
        lock = run_dir / LOCK_FILE  # of other ranks' hosts, it may not be there
        if len({*world.together("the run's lock", lambda: lock.exists() and lock.read_text())}) > 1:
            raise CheckpointError(
                f"output_dir = {str(run_dir)!r} is not the same folder on all ranks; name one on a file "
                "system that their hosts share"
            )
        asked = config.model_dump(mode="json", exclude={"output_dir"}) | {"resume": resume}
        require_alike(world, "the configuration", lambda: asked)
        with world.agreed("the code"):
            code = code_digests(asked)
        require_alike(world, "the code", lambda: {place: digest[:16] for place, digest in code.items()})
        if world.from_lead("the run's folder", partial(world.begun, run_dir)):
            resume = "latest"
        config = world.from_lead("the length", partial(with_steps, config))
        config = world.from_lead("the plan", partial(resolve_auto, config, run_dir, ranks=world.size))
        store = CheckpointStore(run_dir / CHECKPOINTS_DIR, config.checkpoint.keep, world)
        find = partial(find_checkpoint, run_dir, store, config, resume, code, changed_code=changed_code)
        checkpoint, changes = world.from_lead("the checkpoint", find)
        own_dir = run_dir
        if not world.leads:  # rank 0's are the run's files: what the others write, nobody keeps
            own_dir = Path(stack.enter_context(TemporaryDirectory(prefix="grpo-fast-rank-")))
            quiet = {"output_dir": str(own_dir), "logging": LoggingConfig(), "callbacks": [], "hub": None}
            config, display = config.model_copy(update=quiet), False
            if checkpoint is not None:
                checkpoint = replace(checkpoint, state={**checkpoint.state, "offsets": {}, "callbacks": {}})
        with world.agreed("the callbacks"):
            callbacks = build_callbacks(config)
        require_mirrors(config.logging)
        world.from_lead("the call's objects", partial(keep, files, run_dir))
        with world.agreed("the model and the data"):
            trainer = build_trainer(config, world)
        # A checkpoint has of each weight two moments and itself or its master, in 32 bits at least.
        size = sum(3 * w.numel() * max(w.itemsize, 4) for w in trainer.policy.trainable().values())
        saves = math.ceil(config.max_steps / (config.checkpoint.every or config.max_steps))
        world.from_lead("the room for checkpoints", partial(store.check_room, size, saves))
        engine = stack.enter_context(ExitStack())
        engine.enter_context(trainer)
        if checkpoint is not None:
            trainer.optimizer.load_state_tensors(  # which exchanges rows when all ranks have read theirs
                checkpoint.tensors,
                lambda into: world.together("the checkpoint", partial(checkpoint.load, into)),
            )
            trainer.optimizer.load_state(checkpoint.state["optimizer"])
            trainer.load_state_dict(checkpoint.state["trainer"])
            restore_rng(checkpoint.state["rng"])
            trainer.step = checkpoint.step
        write_whole(own_dir / CONFIG_FILE, dump_config(config).encode())
        world.began(run_dir)
        signals = stack.enter_context(noting_signals())
        recorder = stack.enter_context(
            Recorder(
                trainer, config, store, checkpoint=checkpoint, show=display, callbacks=callbacks, code=code
            )
        )
        trainer.on_progress = recorder.display.rollout
        for line in opening_lines(config, trainer) if world.leads else ():
            recorder.say(line)
        if resume is not None:
            origin = "the beginning, without a checkpoint" if checkpoint is None else checkpoint.path
            if trainer.step == config.max_steps:
                changes += ["all steps are done, raise max_steps to go on"]
            recorder.say("; ".join([f"resumed after step {trainer.step} from {origin}", *changes]))
        with world.agreed("the beginning"):
            recorder.begin()
        stopped_by = None
        while trainer.step < config.max_steps:
            world.step = trainer.step + 1
            heard = world.together("the start", lambda: (signals[:1], callbacks.stopped_by))
            stopped_by = next((first for received, _ in heard for first in received), None)
            if stopped_by or any(asked for _, asked in heard):
                break
            with world.agreed("the step"):
                result = trainer.train_step()
            with world.agreed("the record"):
                recorder.record(result)
        with world.agreed("the last checkpoint"):
            recorder.save_last()
        engine.close()
        world.leave()  # what rank 0 does now takes as long as it takes
        if world.leads:
            recorder.finish(stopped_by)
    return Ended(run_dir, stopped_by)


def keep(files: Mapping[str, bytes], run_dir: Path) -> None:
    for name, content in files.items():
        (run_dir / name).parent.mkdir(exist_ok=True)
        write_whole(run_dir / name, content)


@contextmanager
def noting_signals() -> Iterator[list[Signals]]:
    """SIGINTs, SIGTERMs and SIGHUPs that came: at the first a run finishes its step, saves and leaves.

    A second SIGINT interrupts at once. Only a process's main thread hears of signals, and one that `nohup`
    started of no SIGHUP.
    """
    received: list[Signals] = []

    def note(number: int, _frame: object) -> None:
        if received and number == SIGINT:
            raise KeyboardInterrupt
        received.append(Signals(number))

    heard = [] if threading.current_thread() is not threading.main_thread() else [SIGINT, SIGTERM]
    if heard and signal.getsignal(SIGHUP) is not signal.SIG_IGN:
        heard.append(SIGHUP)
    previous = {number: signal.signal(number, note) for number in heard}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
    checkpoint = store.load_intact() if resume == "latest" else store.load(resume)
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
    if not checkpoint.state:
        raise CheckpointError(f"{resume} holds weights alone: it can be exported, and not be resumed")
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
        if same_object(old, new) and not key.startswith(CHANGEABLE):
            edited.append(f"{key} = {new!r} has changed")
        elif not same_input(old, new):
            changes[key] = f"{key} was {short(old)}, is {short(new)}"
    if refused := [text for key, text in changes.items() if not key.startswith(CHANGEABLE)]:
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


def same_object(old: Any, new: Any) -> bool:
    """Whether two names are of one object of a Python program, whose source is another."""
    name, other = (OBJECT.fullmatch(str(one)) for one in (old, new))
    return name is not None and other is not None and name[1] == other[1]


def same_input(old: Any, new: Any) -> bool:
    """Whether two paths lead to the same rows in a run's folder that has moved: names there hold a digest."""
    ends = [Path(one).parts[-2:] if isinstance(one, str) else () for one in (old, new)]
    return ends[0] == ends[1] and ends[0][:1] == (INPUTS_DIR,)
