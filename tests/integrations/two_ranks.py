"""Starts two processes with a gloo group: the workers' last line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run(main: Callable[..., None], *arguments: Any) -> None:
    """`main(rank, *arguments)` in two processes, forked after the imports. The store is `sys.argv[1]`."""
    multiprocessing.start_processes(_start, args=(main, arguments), nprocs=2, start_method="fork")


def _start(rank: int, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= ranks  # which Accelerate reads
    store, timeout = f"file://{sys.argv[1]}", timedelta(seconds=500)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    main(rank, *arguments)
    dist.destroy_process_group()
