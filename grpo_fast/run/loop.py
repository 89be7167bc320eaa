"""Drives a run from its configuration to its report: finds where to go on, then step after step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import dump_config, load_config
from grpo_fast.plan import resolve_auto
from grpo_fast.policy.random_state import restore_rng
from grpo_fast.run.build import build_trainer
from grpo_fast.run_record.checkpoint import Checkpoint, CheckpointError, CheckpointStore, check_writable
from grpo_fast.run_record.files import CHECKPOINTS_DIR, CONFIG_FILE, write_whole
from grpo_fast.run_record.recorder import Recorder
from grpo_fast.trainer import Trainer

# What a resumed run may do differently and still be the same run.
CHANGEABLE = {"output_dir", "max_steps", "threads", "checkpoint", "logging", "alerts", "memory"}


def train(config: TrainConfig, *, resume: str | None = None, display: bool = True) -> Path:
    """Train as configured; returns the run's directory.

    Args:
        config: the whole run.
        resume: "latest" continues from the newest checkpoint in `config.output_dir`, a path from that one.
        display: show progress; the files of the run are written either way.

    Raises:
        CheckpointError: the directory cannot be written, holds another run, or its newest checkpoint is
            damaged; the message names the remedy.
        ValueError: the configuration contradicts the model or the data. Raised before any training.
        Exception: as a step raised it, after the last finished step was saved where that is possible.
    """
    run_dir = Path(config.output_dir)
    config = resolve_auto(config, run_dir)
    check_writable(run_dir, needed_bytes=0)
    store = CheckpointStore(run_dir / CHECKPOINTS_DIR, keep=config.checkpoint.keep)
    checkpoint = find_checkpoint(run_dir, store, config, resume)
    with ExitStack() as stack:
        trainer = build_trainer(config)
        if isinstance(trainer, Trainer):
            stack.enter_context(trainer.engine)
        if checkpoint is not None:
            trainer.optimizer.load_state_tensors(checkpoint.tensors["optimizer"])
            trainer.optimizer.load_state(checkpoint.state["optimizer"])
            trainer.load_state_dict(checkpoint.state["trainer"])
            restore_rng(checkpoint.tensors["rng"], checkpoint.state["rng"])
            trainer.step = checkpoint.step
        # A checkpoint has the weights, their two moments and float32 masters.
        weights = trainer.policy.trainable().values()
        check_writable(run_dir, needed_bytes=sum(p.numel() * (p.element_size() + 12) for p in weights))
        write_whole(run_dir / CONFIG_FILE, dump_config(config).encode())
        signals = stack.enter_context(noting_signals())
        recorder = stack.enter_context(Recorder(trainer, config, store, checkpoint=checkpoint, show=display))
        if isinstance(trainer, Trainer):
            trainer.on_progress = recorder.on_progress
        recorder.begin()
        while trainer.step < config.max_steps and not signals:
            recorder.record(trainer.train_step())
        recorder.finish(signals[0] if signals else None)
    return run_dir


@contextmanager
def noting_signals() -> Iterator[list[str]]:
    """SIGINTs and SIGTERMs by name: at the first a run finishes its step, saves and leaves.

    A second SIGINT interrupts at once.
    """
    received: list[str] = []

    def note(number: int, _frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def find_checkpoint(
    run_dir: Path, store: CheckpointStore, config: TrainConfig, resume: str | None
) -> Checkpoint | None:
    """The checkpoint to continue from; none for a new run, or one that was stopped before its first.

    The latter may go on with any configuration: nothing that it has trained is kept.
    """
    earlier = run_dir / CONFIG_FILE
    if resume is None:
        if earlier.exists():
            raise CheckpointError(
                f"output_dir = {str(run_dir)!r} already holds a run; continue it with --resume, or choose "
                "another"
            )
        return None
    if not earlier.exists():
        raise CheckpointError(
            f"output_dir = {str(run_dir)!r} holds no run to resume; start it without --resume"
        )
    checkpoint = store.load_latest() if resume == "latest" else store.load(Path(resume))
    before, now = (one.model_dump(mode="json") for one in (load_config(earlier), config))
    changed = [key for key in now if key not in CHANGEABLE and now[key] != before[key]]
    if changed and checkpoint is not None:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was started with another configuration "
            f"({', '.join(changed)} differ): resume with its own ({earlier}), or start a new run in "
            "another output_dir"
        )
    return checkpoint
