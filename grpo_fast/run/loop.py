"""Train a run: its ranks, its folder, its checkpoint, its steps and its signals."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, Signals
from tempfile import TemporaryDirectory
from typing import Any

from grpo_fast.config.load import dump_config
from grpo_fast.config.lookup import exits_are_errors
from grpo_fast.config.paths import with_absolute_paths
from grpo_fast.config.record import CHECKPOINTS_DIR, CONFIG_FILE, LOCK_FILE, LoggingConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data.sources import rows_read_once
from grpo_fast.distributed.world import World, joined
from grpo_fast.loop.algorithm import Algorithm
from grpo_fast.plan import resolve_auto
from grpo_fast.policy.load import resolve_device
from grpo_fast.policy.out_of_memory import expand_segments
from grpo_fast.policy.random_state import restore_rng
from grpo_fast.record.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from grpo_fast.record.files import write_whole
from grpo_fast.record.mirrors import require_mirrors
from grpo_fast.record.recorder import Recorder
from grpo_fast.run.alike import code_digests, find_checkpoint, require_alike
from grpo_fast.run.build import build_callbacks, build_trainer
from grpo_fast.run.folder import delete_run, hold_folder
from grpo_fast.run.loaded import Loaded
from grpo_fast.run.loader import with_steps
from grpo_fast.run.opening import opening_lines


@dataclass(frozen=True)
class RunOutcome:
    """A run that has trained and saved."""

    run_dir: Path
    stopped_by: Signals | None  # the signal that ended it before its last step


@dataclass
class PreparedRun:
    """A run that is ready for its next step. An error on one rank ends the run on all."""

    run_dir: Path
    trainer: Algorithm
    recorder: Recorder
    world: World
    signals: list[Signals]  # received so far
    loaded: Loaded
    stopped_by: Signals | None = None

    def begin(self) -> None:
        with self.world.all_succeed("the beginning"):
            self.recorder.begin()

    def goes_on(self) -> bool:
        """Return whether there is another step, and no signal or callback on any rank stops the run."""
        if self.trainer.step >= self.recorder.config.max_steps:
            return False
        self.world.step = self.trainer.step + 1
        callbacks = self.recorder.callbacks
        ranks = self.world.gather_from_all("the start", lambda: (self.signals[:1], callbacks.stopped_by))
        self.stopped_by = next((first for received, _ in ranks for first in received), None)
        return not (self.stopped_by or any(callback for _, callback in ranks))

    def finish(self) -> RunOutcome:
        """Save, free the device, and let rank 0 write the report and call the callbacks."""
        with self.world.all_succeed("the last checkpoint"):
            self.recorder.save_last()
        self.loaded.give_back(self.trainer.policy)
        self.trainer.__exit__()
        self.world.leave()
        if self.world.is_main:
            self.recorder.finish(self.stopped_by)
        return RunOutcome(self.run_dir, self.stopped_by)


def train(
    config: TrainConfig,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    display: bool = True,
    loaded: Loaded | None = None,
) -> RunOutcome:
    """Train to the last step, or finish the current step after a SIGINT, SIGTERM or SIGHUP.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest intact checkpoint in `config.output_dir`, or in the folder
            next to it that started last; a path continues from that checkpoint.
        overwrite: delete the run in `config.output_dir`; otherwise a new run gets a folder next to it.
        display: show progress; the files of the run are written either way.
        loaded: the model and the tokenizer of a Python call.

    Raises:
        RunInUse: another process trains in the directory.
        OSError: the directory cannot be written to.
        CheckpointError: the directory holds another run, or no intact checkpoint; it names the remedy.
        ValueError: the configuration contradicts the model or the data; raised before any training.
        Exception: any error of a step, after the last finished step was saved where that is possible.
    """
    options: Any = {"overwrite": overwrite, "display": display, "loaded": loaded or Loaded()}
    with exits_are_errors(), prepared(config, resume, **options) as run:
        run.begin()
        while run.goes_on():
            with run.world.all_succeed("the step"):
                result = run.trainer.train_step()
            with run.world.all_succeed("the record"):
                run.recorder.record(result)
        return run.finish()


@contextmanager
def prepared(
    config: TrainConfig, resume: str | None, *, overwrite: bool, display: bool, loaded: Loaded
) -> Iterator[PreparedRun]:
    """Check, build and restore everything that a run needs; raise as `train` does."""
    given, config = config, with_absolute_paths(config)
    asked = Path(config.output_dir)
    asked = asked if asked.name not in ("", "..") else asked.resolve()  # `..` cannot be numbered
    with ExitStack() as stack:
        reading = stack.enter_context(ExitStack())
        reading.enter_context(rows_read_once())
        device, timeout = resolve_device(config.model.device), timedelta(minutes=config.distributed.timeout)
        if device.type == "cuda":
            expand_segments()  # before CUDA starts
        world = stack.enter_context(joined(device, timeout, config.distributed.heartbeat_timeout))
        if world.from_main("the run's folder", partial(world.was_started, asked)):
            resume = "latest"
        hold = partial(hold_folder, stack, asked, resume, overwrite=overwrite)
        number = world.from_main("the run's folder", lambda: hold().name.removeprefix(asked.name))
        run_dir = asked.with_name(f"{asked.name}{number}")
        require_one_folder(world, run_dir)
        require_alike_ranks(world, given, resume)  # as written: hosts may have the files in other folders
        code = code_digests(config.model_dump(mode="json"))
        config = config.model_copy(update={"output_dir": str(run_dir)})
        stack.callback(loaded.undo)
        config = world.from_main("the loaded model", partial(loaded.keep, config, fresh=resume is None))
        config = world.from_main("the length", partial(with_steps, config))
        resumed = run_dir if resume is not None else None
        config = world.from_main("the plan", partial(resolve_auto, config, resumed, ranks=world.size))
        store = CheckpointStore(run_dir / CHECKPOINTS_DIR, config.checkpoint.keep, world)
        find = partial(find_checkpoint, run_dir, store, config, resume, code)
        checkpoint, changes = world.from_main("the checkpoint", find)
        own_dir = run_dir
        if not world.is_main:  # only rank 0 writes the run's files
            own_dir = Path(stack.enter_context(TemporaryDirectory(prefix="grpo-fast-rank-")))
            quiet = {"output_dir": str(own_dir), "logging": LoggingConfig(), "callbacks": [], "hub": None}
            config, display = config.model_copy(update=quiet), False
            if checkpoint is not None:
                checkpoint = replace(checkpoint, state={**checkpoint.state, "callbacks": {}})
        with world.all_succeed("the callbacks"):
            callbacks = build_callbacks(config)
        require_mirrors(config.logging)
        with world.all_succeed("the model and the data"):
            say = partial(print, file=sys.stderr, flush=True) if display else lambda _: None
            trainer = build_trainer(config, world, say)
        reading.close()  # the prompts hold all that is needed of the rows
        stack.enter_context(trainer)
        if checkpoint is not None:
            restore(trainer, checkpoint)
        if overwrite and resume is None:  # not when torchrun has restarted the new run
            delete_run(own_dir, config)
        loaded.settle()
        write_whole(own_dir / CONFIG_FILE, dump_config(config).encode())
        world.mark_started(asked)
        signals = stack.enter_context(noting_signals())
        options: Any = {"checkpoint": checkpoint, "show": display, "callbacks": callbacks, "code": code}
        recorder = stack.enter_context(Recorder(trainer, config, store, **options))
        trainer.on_progress = recorder.display.rollout
        for line in opening_lines(config, trainer) if world.is_main else ():
            recorder.say(line)
        if run_dir != asked and resume is None:
            recorder.say(f"{asked} holds another run, so this one is in {run_dir}")
        if resume is not None:
            origin = "the beginning, without a checkpoint" if checkpoint is None else checkpoint.path
            if trainer.step == config.max_steps:
                changes += ["all steps are done, raise max_steps to go on"]
            recorder.say("; ".join([f"resumed after step {trainer.step} from {origin}", *changes]))
        yield PreparedRun(run_dir, trainer, recorder, world, signals, loaded)


def require_one_folder(world: World, run_dir: Path) -> None:
    """Raise CheckpointError where ranks see different folders under one name."""
    lock = run_dir / LOCK_FILE
    if len({*world.gather_from_all("the run's lock", lambda: lock.exists() and lock.read_text())}) > 1:
        raise CheckpointError(
            f"output_dir = {str(run_dir)!r} is not the same folder on all ranks; name one on a file "
            "system that their hosts share"
        )


def require_alike_ranks(world: World, config: TrainConfig, resume: str | None) -> None:
    """Raise as `require_alike` where ranks have different settings or code."""
    asked = config.model_dump(mode="json", exclude={"output_dir"}) | {"resume": resume}
    require_alike(world, "the configuration", lambda: asked)
    with world.all_succeed("the code"):
        code = code_digests(asked)
    require_alike(world, "the code", lambda: {place: digest[:16] for place, digest in code.items()})


def restore(trainer: Algorithm, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into the trainer."""
    trainer.optimizer.load_state_tensors(  # ranks exchange rows once all have read theirs
        checkpoint.tensors,
        lambda into: trainer.world.gather_from_all("the checkpoint", partial(checkpoint.load, into)),
    )
    trainer.optimizer.load_state(checkpoint.state["optimizer"])
    trainer.load_state_dict(checkpoint.state["trainer"])
    restore_rng(checkpoint.state["rng"])
    trainer.step = checkpoint.step


@contextmanager
def noting_signals() -> Iterator[list[Signals]]:
    """Collect SIGINT, SIGTERM and SIGHUP: after the first, a run finishes its step, saves and ends.

    The first is acknowledged on stderr. A second SIGINT interrupts at once. Only the main thread gets
    signals, and a process under `nohup` keeps ignoring SIGHUP.
    """
    received: list[Signals] = []

    def note(number: int, _frame: object) -> None:
        if received and number == SIGINT:
            raise KeyboardInterrupt
        received.append(Signals(number))
        again = "; interrupt again to leave at once with the last finished step" if number == SIGINT else ""
        with suppress(RuntimeError, OSError):  # stderr is busy, or its terminal is gone
            print(f"\n{Signals(number).name}: the step is finished and saved first{again}", file=sys.stderr)

    handled = [SIGINT, SIGTERM] if threading.current_thread() is threading.main_thread() else []
    if handled and signal.getsignal(SIGHUP) is not signal.SIG_IGN:
        handled.append(SIGHUP)
    previous = {number: signal.signal(number, note) for number in handled}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
