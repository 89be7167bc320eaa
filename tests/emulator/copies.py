"""Asynchronous copies into shared memory: they arrive only when a thread waits for them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .matrix import swizzled
from .ptx import Instruction, forbid
from .threads import Threads


class Box(NamedTuple):
    """A tensor map: how boxes of a matrix, (rows, bytes) uint8 in global memory, are copied."""

    matrix: np.ndarray
    rows: int
    columns: int
    size: int  # of an element
    span: int  # of a swizzled row, in bytes


@dataclass
class Barrier:
    """An mbarrier: a phase ends when `count` threads and all expected bytes have arrived."""

    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)


def commit(threads: Threads, code: Instruction) -> None:
    threads.committed[threads.acting] += 1


def copy_words(threads: Threads, code: Instruction) -> None:
    """Copy 4, 8 or 16 bytes per thread: its source, or zeros if the source has no bytes."""
    lanes, width = threads.lanes, int(code.operands[2], 0)
    given = threads.each((*code.operands, str(width))[3], "u32")[lanes]
    forbid((given != 0) & (given != width), "the emulator copies all bytes or none")
    data, full = np.zeros((len(lanes), width), np.uint8), given == width
    source = threads.address(code.operands[1])[lanes]
    data[full] = threads.launch.memory.read(threads, lanes[full], source[full], width)
    cell, at = threads.shared.locate((threads.base + threads.address(code.operands[0]))[lanes], width)
    threads.shared.claim(threads, lanes, at)
    threads.shared.written[at] = -1
    threads.copies.append((lanes, threads.committed[lanes], cell, at, data))


def arrive(threads: Threads, code: Instruction) -> None:
    """Let what these threads have copied arrive, but for the last groups."""
    under_way, last = [], threads.committed - int(code.operands[0])
    for each in threads.copies:
        ready = threads.acting[each[0]] & (each[1] < last[each[0]])
        if not ready.all():
            under_way.append(tuple(part[~ready] for part in each))
        lanes, _, cell, at, data = (part[ready] for part in each)
        threads.shared.claim(threads, lanes, at)
        threads.shared.cells(data.shape[1])[cell] = data.view(f"V{data.shape[1]}")[:, 0]
    threads.copies = under_way


def copy_boxes(threads: Threads, code: Instruction) -> None:
    """Copy a box per thread, zeros beyond the matrix; an mbarrier counts its bytes."""
    operands = re.fullmatch(r"\[(\S+),\s*\{(\S+),\s*(\S+)\}\]", code.operands[1]).groups()
    handles, columns, rows = map(threads.each, operands, ("u64", "s32", "s32"))
    to = threads.address(code.operands[0])
    for lane, barrier in barriers(threads, code.operands[2]):
        box = threads.launch.boxes[handles[lane]]
        forbid(min(rows[lane], columns[lane]) < 0, "a box that begins before its matrix")
        data = np.zeros((box.rows, box.columns * box.size), np.uint8)
        found = box.matrix[rows[lane] :, columns[lane] * box.size :][: box.rows, : data.shape[1]]
        data[: found.shape[0], : found.shape[1]] = found
        places = swizzled(to[lane] + np.arange(data.size), box.span)
        cell, at = threads.shared.locate(threads.base[lane] + places, 1)
        threads.shared.written[at] = -1
        barrier.copies.append((cell, at, data.ravel()))


def barriers(threads: Threads, operand: str):
    """Yield each thread and the mbarrier at its address."""
    address = threads.address(operand)
    for lane in threads.lanes:
        yield lane, threads.barriers.setdefault((threads.slot[lane], address[lane]), Barrier())


def synchronize(threads: Threads, code: Instruction) -> None:
    """Let threads initialize an mbarrier, arrive at it, or wait until a phase of this parity has ended."""
    action, number, shared, stuck = code.parts[1], code.operands[-1], threads.shared, []
    parity = threads.each(number, "u32") & 1 if action == "wait" else None
    for lane, barrier in barriers(threads, next(each for each in code.operands if each[0] == "[")):
        if action == "init":
            barrier.count = barrier.pending = int(number)
            barrier.phase = barrier.bytes = 0
        elif action == "arrive":
            barrier.bytes += int(number) if "expect_tx" in code.parts else 0
            barrier.pending -= 1
        elif action == "wait":
            for cell, at, data in barrier.copies:
                shared.content[cell], shared.written[at] = data, 0
                barrier.bytes -= data.size
            barrier.copies = []
        forbid(barrier.pending < 0, "more threads arrive at an mbarrier than it expects")
        if barrier.count and barrier.pending == barrier.bytes == 0:
            barrier.phase, barrier.pending = barrier.phase ^ 1, barrier.count
            threads.parked[threads.slot == threads.slot[lane]] = False
        if action == "wait" and barrier.phase == parity[lane]:
            stuck.append(lane)
    if stuck:
        threads.scatter()
        threads.counters[stuck] = threads.pc - 1
        threads.parked[stuck] = True


COPIES = {"commit_group": commit, "wait_group": arrive}
COPIES |= {"bulk": copy_boxes, "ca": copy_words, "cg": copy_words}
STEPS = {"mbarrier": synchronize, "cp": lambda threads, code: COPIES[code.parts[2]](threads, code)}
