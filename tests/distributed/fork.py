"""Ranks as torchrun starts them, forked from a process that has imported what takes seconds."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from grpo_fast.distributed.world import joined


def fork(main: Callable[..., None], size: int, *arguments: Any, timeout: float = 300) -> None:
    """`main(world, *arguments)` on each rank; an error of one is raised."""
    spawn = {"nprocs": size, "start_method": "fork"}
    multiprocessing.start_processes(as_rank, args=(size, free_port(), timeout, main, arguments), **spawn)


def as_rank(
    rank: int, size: int, port: int, timeout: float, main: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    be_rank(rank, size, port)
    torch.set_num_threads(1)
    with joined(torch.device("cpu"), timedelta(seconds=timeout)) as world:
        main(world, *arguments)


def be_rank(rank: int, size: int, port: int) -> None:
    """What torchrun tells a process."""
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": 0}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {
        k: str(v) for k, v in torchrun.items()
    }


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
