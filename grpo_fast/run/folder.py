"""Choose a run's folder: a new one next to another run's, the same one emptied, or the newest to resume."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from grpo_fast.config.record import CHECKPOINTS_DIR, CONFIG_FILE, INPUTS_DIR
from grpo_fast.config.schema import TrainConfig
from grpo_fast.record.checkpoint import CheckpointStore
from grpo_fast.record.files import RunInUse, locked_run_dir, read_jsonl, write_whole
from grpo_fast.record.logs import FILES, METRICS_FILE
from grpo_fast.record.mirrors import KINDS
from grpo_fast.record.report import REPORT_FILE

NEWEST_FILE = "newest_run"  # names, in the folder that was asked for, the run next to it that started last


def hold_folder(stack: ExitStack, asked: Path, resume: str | None, *, overwrite: bool) -> Path:
    """Lock a run's folder while the stack is open, and return it.

    Args:
        asked: `output_dir`. Where it holds a run, a new run gets `asked-2`, `asked-3` and so on.
        resume: "latest" takes the newest of these; a path takes the folder of that run or checkpoint.
        overwrite: take `asked`, whose run `delete_run` deletes once the new one can start.
    """
    if resume is not None:
        run_dir, newest, of_checkpoint = asked, asked / NEWEST_FILE, Path(resume).parent.parent
        if resume == "latest" and newest.is_file():
            last = asked.with_name(newest.read_text(encoding="utf-8").strip())
            run_dir = last if (last / CONFIG_FILE).is_file() else asked
        elif resume != "latest" and of_checkpoint.name.startswith(f"{asked.name}-"):
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
            if overwrite or not _is_used(run_dir):
                if number > 1:
                    write_whole(asked / NEWEST_FILE, run_dir.name.encode())
                stack.push(lock.pop_all())
                return run_dir
    raise AssertionError("the numbers end")


def delete_run(run_dir: Path, config: TrainConfig) -> None:
    """Delete the run in a folder, if there is one, except inputs that `config` reads."""
    if not (run_dir / CONFIG_FILE).is_file():
        return
    for name in (CONFIG_FILE, NEWEST_FILE, REPORT_FILE, *FILES, *(f"{kind}_id" for kind in KINDS)):
        (run_dir / name).unlink(missing_ok=True)
    inputs = [run_dir / INPUTS_DIR / name for name in ("model", "tokenizer")]
    unread = [folder for folder in inputs if str(folder) not in (config.model.path, config.model.tokenizer)]
    for folder in (run_dir / CHECKPOINTS_DIR, *(run_dir / kind for kind in KINDS), *unread):
        shutil.rmtree(folder, ignore_errors=True)


def _is_used(run_dir: Path) -> bool:
    """Return whether a run in the folder has made a step; one that stopped before may start again."""
    steps = any(record["step"] for record in read_jsonl(run_dir / METRICS_FILE))
    return steps or bool(CheckpointStore(run_dir / CHECKPOINTS_DIR).paths())
