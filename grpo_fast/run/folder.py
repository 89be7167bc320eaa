"""Which folder a run gets: a new one next to another run's, that one emptied, or its newest to resume."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from grpo_fast.config.record import CHECKPOINTS_DIR, CONFIG_FILE, INPUTS_DIR
from grpo_fast.record.checkpoint import CheckpointStore
from grpo_fast.record.files import RunInUse, locked_run_dir, read_jsonl, write_whole
from grpo_fast.record.logs import METRICS_FILE

NEWEST_FILE = "newest_run"  # in a run's folder: the name of the one next to it that was started last


def hold_folder(stack: ExitStack, asked: Path, resume: str | None, *, overwrite: bool) -> Path:
    """Lock a run's folder while the stack is open, and return it.

    Args:
        asked: `output_dir`. Where it holds a run, a new one gets `asked-2`, `asked-3` and so on.
        resume: "latest" takes the newest of these, a checkpoint's path the folder that it lies in, and the
            path of `asked` that one.
        overwrite: delete the run in `asked`.

    Raises:
        RunInUse: another process trains there.
        OSError: the folder cannot be written to.
    """
    if resume is not None:
        newest = asked / NEWEST_FILE
        follows = resume == "latest" and newest.is_file()
        run_dir = asked.with_name(newest.read_text(encoding="utf-8").strip()) if follows else asked
        of_checkpoint = Path(resume).parent.parent
        if resume != "latest" and of_checkpoint.name.startswith(f"{asked.name}-"):
            run_dir = of_checkpoint
        stack.enter_context(locked_run_dir(run_dir))
        return run_dir
    for number in count(1):
        run_dir = asked if number == 1 else asked.with_name(f"{asked.name}-{number}")
        with ExitStack() as lock:
            try:
                lock.enter_context(locked_run_dir(run_dir))
            except RunInUse:
                if number == 1:
                    raise
                continue
            if overwrite:
                for name in (CHECKPOINTS_DIR, INPUTS_DIR):
                    shutil.rmtree(run_dir / name, ignore_errors=True)
                for name in (CONFIG_FILE, METRICS_FILE, NEWEST_FILE):
                    (run_dir / name).unlink(missing_ok=True)
            if not _is_used(run_dir):
                if number > 1:
                    write_whole(asked / NEWEST_FILE, run_dir.name.encode())
                stack.push(lock.pop_all())
                return run_dir
    raise AssertionError("the numbers end")


def _is_used(run_dir: Path) -> bool:
    """Return whether a run in the folder has made a step: one that was stopped before may start again."""
    steps = any(record["step"] for record in read_jsonl(run_dir / METRICS_FILE))
    return steps or bool(CheckpointStore(run_dir / CHECKPOINTS_DIR).paths())
