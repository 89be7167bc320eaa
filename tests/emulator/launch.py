"""Launches of compiled kernels on CPU tensors: those of Triton, and of any PTX."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.kernels.aot import offline

from . import arithmetic, memory, threads
from .ptx import parse

STEPS = threads.STEPS | arithmetic.STEPS | memory.STEPS
TOGETHER = 1024  # threads in lockstep: NumPy takes as long for fewer
GAP = 1 << 14  # bytes between the shared memories of programs


@dataclass
class Launch:
    """A grid of programs. `arguments` are bytes; `spans` are the addresses and sizes that may be accessed."""

    ptx: str
    arguments: Sequence[bytes]
    grid: tuple[int, int, int]
    spans: list[tuple[int, int]]
    warps: int
    shared: int  # bytes of a program
    boxes: dict[int, memory.Box] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernel = parse(self.ptx)
        numbers = re.findall(r"\b(?:ld|st)\.(?:global|shared)\S*?[busf](\d+)\b", self.ptx)
        self.granule = min([4, *(int(bits) // 8 for bits in numbers)])  # bytes of the smallest access
        self.memory = memory.Memory("global", self.spans, self.granule)

    def shared_memory(self, slot: np.ndarray) -> tuple[memory.Memory, np.ndarray]:
        """Return the shared memory of programs, and (threads,) where each thread's begins."""
        room = -(-self.shared // 16) * 16 + GAP
        self.storage = torch.full(((int(slot[-1]) + 1) * room,), 255, dtype=torch.uint8)
        begins = self.storage.data_ptr() + room * np.arange(slot[-1] + 1)
        spans = [(int(begin), max(self.shared, 1)) for begin in begins]
        return memory.Memory("shared", spans, self.granule), begins[slot]

    def run(self) -> None:
        programs = list(np.ndindex(*self.grid))
        random.shuffle(programs)
        count = max(1, TOGETHER // (threads.LANES * self.warps))
        with np.errstate(all="ignore"):
            for first in range(0, len(programs), count):
                threads.Threads(self, programs[first : first + count]).run(STEPS)


@contextmanager
def emulated(architecture: str) -> Iterator[None]:
    """Run Triton's launches on CPU tensors: compiled for this architecture, executed by the emulator."""
    from triton.compiler.compiler import CompiledKernel

    launcher = property(lambda kernel: lambda *given: _launch_triton(kernel, given[:3], given[9:]))
    no_metadata = {"launch_metadata": lambda *_: None}
    with offline(architecture), mock.patch.multiple(CompiledKernel, run=launcher, **no_metadata):
        yield


def _launch_triton(kernel: Any, grid: tuple[int, int, int], given: tuple[Any, ...]) -> None:
    arguments: list[bytes] = []
    tensors, boxes = [], {}
    layouts = iter(getattr(kernel.metadata, "tensordesc_meta", None) or [])

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for each in zip(kind, value, strict=True):
                add(*each)
        elif kind.startswith("tensordesc"):
            layout, base, shape = next(layouts, None), value.base, (*value.shape, *value.strides)
            numbers = [base.data_ptr(), *shape, value.padding == "nan", value.round_f32_to_tf32]
            if layout:  # a tensor map, where the architecture has them
                rows = base.detach().as_strided(value.shape, value.strides).view(torch.uint8).numpy()
                numbers, span = [len(arguments)], 16 << layout["swizzle"]
                boxes[numbers[0]] = memory.Box(rows, *layout["block_size"], base.itemsize, span)
            tensors.append(base)
            arguments.extend(np.int64(number).tobytes() for number in (*numbers, *shape))
        elif kind.startswith("*"):
            tensors.append(value)
            arguments.append(np.int64(value.data_ptr()).tobytes())
        elif kind != "constexpr":
            arguments.append((np.float32 if kind.startswith("fp") else np.int64)(value).tobytes())

    for kind, value in zip(kernel.src.signature.values(), given, strict=True):
        add(kind, value)
    arguments += [bytes(8)] * 2  # Triton's scratch memory, which no kernel of ours has
    spans = [(each.data_ptr(), each.nbytes()) for each in map(torch.Tensor.untyped_storage, tensors)]
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    Launch(kernel.asm["ptx"], arguments, grid, spans, warps, shared, boxes).run()
