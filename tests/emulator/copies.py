"""Asynchronous copies into shared memory: they arrive only when a thread waits for them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .matrix import swizzled
from .ptx import Fault, Instruction
from .threads import Threads


class Copy(NamedTuple):
    """What threads copy by one `cp.async`; `group` is the number of the group it will belong to."""

    lanes: np.ndarray
    group: np.ndarray
    cell: np.ndarray
    at: np.ndarray
    data: np.ndarray  # (lanes, bytes)


class Box(NamedTuple):
    """A tensor map: boxes of a matrix, (rows, bytes) uint8 in global memory."""

    matrix: np.ndarray
    rows: int
    columns: int
    size: int  # of an element
    span: int  # of a swizzled row, in bytes

    def read(self, row: int, column: int) -> np.ndarray:
        """Return the bytes of a box that begins here: zero beyond the matrix."""
        if min(row, column) < 0:
            raise Fault("a box that begins before its matrix")
        data = np.zeros((self.rows, self.columns * self.size), np.uint8)
        found = self.matrix[row : row + self.rows, column * self.size :][:, : data.shape[1]]
        data[: found.shape[0], : found.shape[1]] = found
        return data.ravel()


@dataclass
class Barrier:
    """An mbarrier: a phase ends when so many threads have arrived and all expected bytes, too."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)


def copy(threads: Threads, code: Instruction) -> None:
    """`cp.async`, of 4, 8 or 16 bytes per thread: its source, or zeros where the source has no bytes."""
    match code.parts[2]:
        case "commit_group":
            threads.committed[threads.acting] += 1
        case "wait_group":
            arrive(threads, int(code.operands[0]))
        case "bulk":
            copy_box(threads, code)
        case "ca" | "cg":
            lanes, width = threads.lanes, int(code.operands[2], 0)
            given = threads.each((*code.operands, str(width))[3], "u32")[lanes]
            if not np.isin(given, (0, width)).all():
                raise Fault("the emulator copies all bytes or none")
            data, full = np.zeros((len(lanes), width), np.uint8), given == width
            source = threads.address(code.operands[1])[lanes]
            data[full] = threads.launch.memory.read(threads, lanes[full], source[full], width)
            cell, at = threads.shared.locate((threads.base + threads.address(code.operands[0]))[lanes], width)
            threads.shared.claim(threads, lanes, at)
            threads.shared.written[at] = -1
            threads.copies.append(Copy(lanes, threads.committed[lanes], cell, at, data))
        case _:
            raise Fault("the emulator has no such copy")


def arrive(threads: Threads, left: int) -> None:
    """Let what these threads have copied arrive, but for the last groups."""
    under_way = []
    for each in threads.copies:
        ready = threads.acting[each.lanes] & (each.group < threads.committed[each.lanes] - left)
        if not ready.all():
            under_way.append(Copy(*(part[~ready] for part in each)))
        lanes, _, cell, at, data = (part[ready] for part in each)
        threads.shared.claim(threads, lanes, at)
        threads.shared.cells(data.shape[1])[cell] = data.view(f"V{data.shape[1]}")[:, 0]
    threads.copies = under_way


def copy_box(threads: Threads, code: Instruction) -> None:
    """`cp.async.bulk.tensor.2d`: one thread copies a box and tells an mbarrier."""
    descriptor, column, row = re.fullmatch(r"\[(\S+),\s*\{(\S+),\s*(\S+)\}\]", code.operands[1]).groups()
    handles, rows, columns = (
        threads.each(name, "s64"[:1] + bits)
        for name, bits in zip((descriptor, row, column), ("64", "32", "32"), strict=True)
    )
    to = threads.address(code.operands[0])
    for lane in threads.lanes:
        box = threads.launch.boxes[int(handles[lane])]
        data = box.read(int(rows[lane]), int(columns[lane]))
        places = threads.base[lane] + swizzled(int(to[lane]) + np.arange(data.size), box.span)
        cell, at = threads.shared.locate(places, 1)
        threads.shared.written[at] = -1
        mbarrier(threads, lane, code.operands[2]).copies.append((cell, at, data))


def mbarrier(threads: Threads, lane: int, operand: str) -> Barrier:
    key = int(threads.slot[lane]), int(threads.address(operand)[lane])
    if key not in threads.barriers:
        raise Fault("an mbarrier that nobody has initialized")
    return threads.barriers[key]


def settle(threads: Threads, barrier: Barrier, lane: int) -> None:
    """End the phase of a barrier that is complete, and wake who waits for it."""
    if barrier.pending < 0:
        raise Fault("more threads arrive at an mbarrier than it expects")
    if barrier.pending == barrier.bytes == 0:
        barrier.phase, barrier.pending = barrier.phase ^ 1, barrier.count
        threads.parked[threads.slot == threads.slot[lane]] = False


def barriers(threads: Threads, code: Instruction) -> None:
    *_, number = code.operands
    match code.parts[1]:
        case "init":
            for lane in threads.lanes:
                key = int(threads.slot[lane]), int(threads.address(code.operands[0])[lane])
                threads.barriers[key] = Barrier(int(number), int(number))
        case "arrive":
            for lane in threads.lanes:
                barrier = mbarrier(threads, lane, code.operands[1])
                barrier.bytes += int(number) if "expect_tx" in code.parts else 0
                barrier.pending -= 1
                settle(threads, barrier, lane)
        case "wait":
            wait(threads, *code.operands)


def wait(threads: Threads, operand: str, parity: str) -> None:
    """Stop the threads whose phase has not ended, after what is copied for it has arrived."""
    lanes, shared = threads.lanes, threads.shared
    keys = np.stack([threads.slot, threads.address(operand), threads.each(parity, "u32") & 1], 1)[lanes]
    firsts, members = np.unique(keys, axis=0, return_index=True, return_inverse=True)[1:]
    stuck = np.zeros(threads.count, bool)
    for i, first in enumerate(firsts):
        barrier = mbarrier(threads, lanes[first], operand)
        for cell, at, data in barrier.copies:
            shared.content[cell], shared.written[at], shared.writer[at] = data, 0, -1
            barrier.bytes -= data.size
        if barrier.copies:
            barrier.copies = []
            settle(threads, barrier, lanes[first])
        if barrier.phase == keys[first, 2]:
            stuck[lanes[members.ravel() == i]] = True
    if stuck.any():
        threads.scatter()
        threads.counters[stuck] = threads.pc - 1
        threads.parked |= stuck


STEPS = {"cp": copy, "mbarrier": barriers}
