"""What goes wrong between ranks: `python watch_worker.py FOLDER CASE...`, functions of this file.

Each rank writes FOLDER/CASE.RANK. All cases run at once, since they mostly wait. The last line is JSON: the
exit codes of each case's ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from fork import as_rank, be_rank, free_port
from torch.distributed import TCPStore

from grpo_fast.distributed import watch
from grpo_fast.distributed.world import RankError, World

assert {"BEAT", "GRACE"} <= vars(watch).keys()
watch.BEAT, watch.GRACE = 0.2, 5.0
FOREVER = 1000  # seconds
SIZES = {"killed_in_a_collective": 3, "failed_while_others_work": 3}


def sum_after(world: World, before: Callable[[World], object]) -> None:
    with world.at("the update"):
        before(world)
        world.sum(torch.ones(1))


def killed_in_a_collective(world: World) -> None:
    sum_after(world, lambda world: os.kill(os.getpid(), signal.SIGKILL) if world.rank == 2 else None)


def frozen(world: World) -> None:
    assert world.watch is not None
    world.watch.timeout = 1.5
    sum_after(world, lambda world: os.kill(os.getpid(), signal.SIGSTOP) if world.rank else None)


def refuse(world: World) -> None:
    if world.rank == 1:
        raise ValueError("no such answer")


def failed_while_others_work(world: World) -> None:
    """The others are interrupted, and all leave together: they can still save."""
    try:
        world.gather_from_all("the rewards", lambda: (refuse(world), time.sleep(FOREVER)))
    except (ValueError, RankError):
        assert world.gather_from_all("the checkpoint", lambda: world.rank) == [0, 1, 2]
        raise


def failed_while_a_library_works(world: World) -> None:
    """It catches the error that interrupts it, as torch's checkpoints do."""

    def library() -> None:
        try:
            time.sleep(FOREVER)
        except Exception as error:
            raise AssertionError("metadata is None") from error

    world.gather_from_all("the rewards", lambda: (refuse(world), library()))


def failed_in_an_exchange_within(world: World) -> None:
    try:
        with world.all_succeed("the gradient"):
            refuse(world)
            world.gather_from_all("the micro-batches", bool)
    except (ValueError, RankError):
        assert world.gather_from_all("the checkpoint", lambda: world.rank) == [0, 1]
        raise


def failed_beside_a_collective(world: World) -> None:
    sum_after(world, refuse)


def failed_outside(world: World) -> None:
    refuse(world)
    world.gather_from_all("the rollout", bool)


def hanging(world: World) -> None:
    world.objects = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    world.gather_from_all("the rewards", lambda: time.sleep(FOREVER * world.rank))


def elsewhere(world: World) -> None:
    world.gather_from_all(f"the {'rollout' if world.rank else 'update'}", bool)


def forgiven(world: World) -> None:
    """An error that all have left with ends no later exchange."""
    for _ in range(3):
        try:
            world.gather_from_all("the checkpoint", lambda: refuse(world))
        except (ValueError, RankError):
            world.gather_from_all("the rollout", lambda: time.sleep(0.5))
    sum_after(world, bool)


def started_again(world: World) -> None:
    sum_after(world, bool)


never_there = started_again  # rank 1 ends before it joins


def main(rank: int, folder: str, case: str, size: int, port: int) -> None:
    with (Path(folder) / f"{case}.{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable(all_threads=True)
    if case == "never_there" and rank == 1:
        sys.exit(7)
    try:
        for attempt in range(3 if case == "started_again" else 1):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            be_rank(rank, size, port)
            as_rank(rank, size, port, 6 if case == "never_there" else 300, scene, (globals()[case],))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


def scene(world: World, case: Callable[[World], None]) -> None:
    dist.barrier()
    world.step = 3
    case(world)


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    context = multiprocessing.get_context("fork")
    ranks, stores = {}, []
    for case in cases:
        size, port = SIZES.get(case, 2), free_port()
        if case == "started_again":  # the last: with a store that outlives its ranks, as torchrun's
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            stores.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        ranks[case] = [
            context.Process(target=main, args=(rank, folder, case, size, port)) for rank in range(size)
        ]
        for process in ranks[case]:
            process.start()
    codes = {}
    for case, processes in ranks.items():
        for process in processes[: 1 if case == "frozen" else None]:
            process.join(FOREVER / 8)
            if process.is_alive():  # which is a failure: its file says where it hangs
                os.kill(process.pid, signal.SIGABRT)
                process.join()
        codes[case] = [process.exitcode for process in processes]
        for process in processes:  # one that stays
            process.kill()
    print(json.dumps(codes))
