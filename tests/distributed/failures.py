"""Runs that fail in every way, or are killed at any moment: `failures.py FOLDER N [SEED [KEY=VALUE...]]`.

FOLDER has toy.json, as test_ranks.py leaves one under `pytest --basetemp`. N injected failures, then N
kills; each run goes on with another number of ranks. Prints a table, and leaves with 1 where a run did not
end as it should. What torchrun does is done here, with forks: one store for all attempts, and where a rank
fails all end, by SIGTERM and after 30 s by SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from itertools import count as counting
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
import yaml
from fork import be_rank
from torch.distributed import TCPStore
from torch.distributed.checkpoint.filesystem import FileSystem

import grpo_fast.loop.trainer
import grpo_fast.run  # what the ranks need is imported once
from grpo_fast.cli import main
from grpo_fast.loop.trainer import Trainer
from grpo_fast.loop.update import PolicyUpdate
from grpo_fast.policy import PolicyOptimizer, optimizer
from grpo_fast.record.recorder import Recorder

# what fails when it is called the third time; the place and the step that the others name
PLACES: dict[str, tuple[Any, str, str]] = {
    "rollout": (Trainer, "own_rollout", "rollout of step 3"),
    "reward": (grpo_fast.loop.trainer, "score", "rollout of step 3"),
    "gradient": (PolicyUpdate, "backward", "gradient of step 3"),
    "optimizer": (PolicyOptimizer, "step", "optimizer of step 3"),
    "all-gather": (optimizer, "all_gather", "optimizer of step 3"),
    "evaluation": (grpo_fast.loop.trainer, "evaluate", "record of step 2"),
    "save": (FileSystem, "create_stream", "checkpoint of step 3"),
    "record": (Recorder, "watch", "record of step 2"),
}


WAYS: dict[str, Callable[[], object] | BaseException] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "left": lambda: os._exit(7),
    "told to stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hanging": lambda: time.sleep(600),
    "raised": ValueError("injected"),
    "interrupted": KeyboardInterrupt(),
    "disk full": OSError(28, "No space left on device"),
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}
GOES_ON = [("save", "disk full"), ("gradient", "out of memory")]
CASES = [*product(PLACES, list(WAYS)[:4]), *product(list(PLACES)[:6], ["raised", "interrupted"])]
CASES += [("record", "raised"), ("record", "disk full"), *GOES_ON]
UNWRITTEN = [("record", "raised"), ("record", "disk full")]  # the step is saved, its metrics are not written
SAID = {"killed": r"{} is gone", "left": r"{} is gone", "hanging": r"left waiting by .*{}"}


class Launcher:
    """torchrun's part."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.attempt = run_dir, 0
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(
        self, size: int, *overrides: str, kill: int | None = None, failure: tuple[str, str, int] | None = None
    ) -> tuple[list[int], float]:
        """Each rank's code, and seconds from the first that failed to the last."""
        context = multiprocessing.get_context("fork")
        arguments = [(rank, size, overrides, failure) for rank in range(size)]
        ranks = [context.Process(target=self.rank, args=one) for one in arguments]
        for process in ranks:
            process.start()
        failed = 0.0
        while any(process.is_alive() for process in ranks):
            time.sleep(0.02)
            if kill is not None and len(steps_of(self.run_dir)) > kill:
                time.sleep(random.random())
                random.choice(ranks).kill()
                kill = None
            if not failed and any(process.exitcode for process in ranks):
                failed = time.monotonic()
                for process in ranks:
                    process.terminate()
            if failed and time.monotonic() - failed > 30:
                for process in ranks:
                    process.kill()
        self.attempt += 1
        return [process.exitcode or 0 for process in ranks], time.monotonic() - failed if failed else 0.0

    def rank(self, rank: int, size: int, overrides: list[str], failure: tuple[str, str, int] | None) -> None:
        log = self.run_dir.with_suffix(".log").open("a")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        be_rank(rank, size, self.store.port)
        told = {"USE_AGENT_STORE": True, "RUN_ID": 1, "RESTART_COUNT": self.attempt, "MAX_RESTARTS": 9}
        os.environ |= {f"TORCHELASTIC_{name}": str(value) for name, value in told.items()}
        if failure is not None and rank == failure[2]:
            owner, name, _ = PLACES[failure[0]]
            original, calls = getattr(owner, name), counting(1)

            def failing(*given: Any, **options: Any) -> Any:
                if next(calls) == 3:
                    if isinstance(way := WAYS[failure[1]], BaseException):
                        raise way
                    way()
                return original(*given, **options)

            setattr(owner, name, failing)
        config, output = str(self.run_dir.with_name("run.yaml")), f"output_dir={self.run_dir}"
        code = main(["train", config, output, *overrides, *sys.argv[4:]])
        sys.stdout.flush()
        os._exit(code)


def drawn(run_dir: Path) -> list[Any]:
    """Every step once, and the prompts of each."""
    samples = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
    return [steps_of(run_dir), *dict.fromkeys((s["step"], s["group"], s["question"]) for s in samples)]


def steps_of(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def saved(run_dir: Path) -> int:
    return max((int(path.name[5:]) for path in run_dir.glob("checkpoints/step-????????")), default=0)


def work(folder: Path, count: int, rng: random.Random) -> int:
    """How many runs did not end as they should."""
    toy = json.loads((folder / "toy.json").read_text()) | {"max_steps": 5, "threads": 1}
    toy |= {"checkpoint": {"every": 1}, "logging": {"samples_every": 1, "tensorboard": False}}
    toy["evaluation"] |= {"every": 1, "size": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump(toy))
    Launcher(folder / "whole").run(2)
    whole, wrong = drawn(folder / "whole"), 0
    for number in range(2 * count):
        launcher, log, problems = Launcher(folder / str(number)), folder / f"{number}.log", []
        if number < count:
            place, way = CASES[number % len(CASES)]
            rank = rng.randrange(size := rng.choice((2, 3)))
            short = ["distributed.timeout=0.1"] if way == "hanging" else []
            codes, seconds = launcher.run(size, *short, failure=(place, way, rank))
            who = rf"rank {rank} \(process \d+ on host [^)]*(, \d+ s at the {PLACES[place][2]})?\)"
            said = SAID.get(way, rf"{{}} failed at the {PLACES[place][2]}: |: rank {rank}: ").format(who)
            if any(codes) == ((place, way) in GOES_ON) or any(codes) != all(codes):
                problems.append(f"codes {codes}")
            if all(codes) and way != "told to stop" and not re.search(said, log.read_text()):
                problems.append("nothing names the rank")
        else:
            place, way, rank, size = "anywhere", "killed", 0, rng.choice((1, 2, 3, 4))
            codes, seconds = launcher.run(size, kill=rng.randrange(-1, 4))
        if seconds > 60:
            problems.append(f"{seconds:.0f} s")
        newest, other = saved(launcher.run_dir), rng.choice([n for n in (1, 2, 3, 4) if n != size])
        if rng.random() < 0.5:  # else the same launcher starts them again
            launcher = Launcher(launcher.run_dir)
        how = ["--resume"] * (launcher.attempt == 0 and (launcher.run_dir / "config.yaml").exists())
        ends, _ = launcher.run(other, *how)
        resumed = re.findall(r"resumed after step (\d+)", log.read_text())
        same = drawn(launcher.run_dir) == whole or (place, way) in UNWRITTEN
        if any(ends) or not same or (newest and resumed[-1:] != [str(newest)]):
            problems.append(f"then codes {ends}, resumed after {resumed[-1:]}")
        wrong += bool(problems)
        print(
            f"{number:3} {place:10} {way:13} rank {rank} of {size}: {seconds:4.1f} s, saved {newest},",
            end=" ",
        )
        print(f"then {other} ranks {' '.join(how)} {'; '.join(problems)}", flush=True)
    print(f"{wrong} of {2 * count} did not end as they should")
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(2**31)
    random.seed(seed)
    print(f"seed {seed}")
    sys.exit(work(Path(sys.argv[1]), int(sys.argv[2]), random.Random(seed)) > 0)
