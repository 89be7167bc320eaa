"""Runs of two ranks that an error ends: `python run_worker.py FOLDER`, the toys in FOLDER.

Each rank writes FOLDER/CASE.RANK, what it raised. Then they play with an environment, and one rank goes on
alone with what an error has ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from fork import be_rank, free_port

from grpo_fast.config.schema import TrainConfig
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.record.callbacks import Callback
from grpo_fast.record.checkpoint import Checkpoint, DamagedCheckpoint
from grpo_fast.rollout import transformers
from grpo_fast.rollout.transformers import TransformersEngine
from grpo_fast.run import train

CASES: dict[str, tuple[Exception | None, dict[str, Any]]] = {  # rank 1's third rollout raises; settings
    "reward": (ValueError("no such answer"), {}),
    "diverged": (FloatingPointError("the logits hold NaN"), {"checkpoint": {"every": 1, "keep": 3}}),
    "callback": (None, {"callbacks": [f"{__file__}:Fails"]}),
    "apart": (None, {}),
    "unread": (None, {}),
    "configured": (None, {}),
    "coded": (None, {"rewards": [{"reward": "own.py:length"}]}),
    "rewarded": (None, {"dataset": {"source": "rows.jsonl"}}),
}


def on_its_own_disk(folder: Path, rank: int) -> None:
    """Files of the same names on each rank, whose contents differ."""
    disk = folder / f"disk {rank}"
    disk.mkdir()
    (disk / "own.py").write_text(f"def length(completions): return [{rank}.0 for _ in completions]")
    rows = [{"prompt": f"w{2 + i}", "answer": i + (rank if i == 5 else 0)} for i in range(8)]
    (disk / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    os.chdir(disk)


class Fails(Callback):
    def on_step_end(self, step: int, metrics: Any) -> None:
        if step == 2:
            raise KeyError("mine")


class Last(Callback):
    """Ends with what takes rank 0 longer than anyone waits for it."""

    def on_train_begin(self, step: int, config: TrainConfig, policy: Any) -> None:
        self.sign = Path(config.output_dir).with_suffix(".left")

    def on_train_end(self, step: int, stopped_by: str | None) -> None:
        end = time.monotonic() + 300
        while not self.sign.exists():
            assert time.monotonic() < end, "rank 1 waits for rank 0"
            time.sleep(0.1)


class FailingEngine(TransformersEngine):
    """Raises at the third rollout; its own check is asked first."""

    asked, error = 0, None

    def generate(self, *given: Any, **options: Any) -> Any:
        FailingEngine.asked += 1
        if self.error is not None and self.asked == 4:
            raise self.error
        return super().generate(*given, **options)


def unreadable(*_: Any) -> None:
    raise DamagedCheckpoint("unreadable")


def exchanged(*_: Any) -> None:
    raise AssertionError("in a collective, although another rank has read nothing")


def config_of(folder: Path, case: str, rank: int = 0) -> TrainConfig:
    toy = json.loads((folder / "toy.json").read_text())
    run_dir = folder / {"apart": f"apart on {rank}", "unread": "reward"}.get(case, case)
    toy |= {"max_steps": 4 + rank * (case == "configured"), "output_dir": str(run_dir), "evaluation": {}}
    return TrainConfig(**toy | CASES[case][1])


def run(rank: int, ports: list[int], folder: Path) -> None:
    pytest.MonkeyPatch().setattr(transformers, "TransformersEngine", FailingEngine)
    on_its_own_disk(folder, rank)
    for port, (case, (error, _)) in zip(ports[:-1], CASES.items(), strict=True):
        be_rank(rank, 2, port)
        FailingEngine.asked, FailingEngine.error = 0, error if rank == 1 else None
        with pytest.raises(Exception) as raised, pytest.MonkeyPatch.context() as patch:
            if case == "unread":
                patch.setattr(PolicyOptimizer, "_exchange_rows", exchanged)
                if rank == 1:
                    patch.setattr(Checkpoint, "load", unreadable)
            resume = "latest" if case == "unread" else None
            train(config_of(folder, case, rank), resume=resume, display=False)
        (folder / f"{case}.{rank}").write_text(f"{raised.type.__name__}: {raised.value}")
    be_rank(rank, 2, ports[-1])
    playing = json.loads((folder / "playing.json").read_text())
    playing |= {"output_dir": str(folder / "playing"), "callbacks": [f"{__file__}:Last"]}
    ended = train(TrainConfig(**playing), display=False)
    assert ended.run_dir == folder / "playing"
    if rank == 1:
        (folder / "playing.left").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    ports = [free_port() for _ in (*CASES, "playing")]
    multiprocessing.start_processes(run, args=(ports, folder), nprocs=2, start_method="fork")
    train(config_of(folder, "reward"), resume="latest", display=False)
