"""Global and shared memory: bounds, races, and asynchronous copies, which arrive when a thread waits."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import FUNCTIONS, swizzled
from .ptx import DTYPES, Fault, Instruction, forbid, names
from .threads import Threads

MANY = -2  # warps or programs; -1 is none


class Memory:
    """Spans of addresses, and by granule which warp wrote or read them last, and in which epoch.

    Warps run in any order between two barriers, and programs in any order: it is a fault if that matters.
    Writing what is there already is none: layouts are replicated. Atomic operations are not recorded.
    """

    def __init__(self, name: str, spans: list[tuple[int, int]], granule: int) -> None:
        self.name, self.granule = name, granule
        spans = sorted((begin, begin + size) for begin, size in set(spans) if size)
        self.begins, self.ends = np.array(spans).T
        sizes = (self.ends - self.begins + 15) // 16 * 16
        self.offsets = np.cumsum(sizes) - sizes  # in the record of accesses
        self.low = int(self.begins[0]) // 16 * 16
        everything = ctypes.c_uint8 * ((int(self.ends.max()) - self.low + 15) // 16 * 16)
        self.content = np.frombuffer(everything.from_address(self.low), np.uint8)
        count = int(sizes.sum()) // granule
        self.writes, self.reads = np.full((2, 3, count), -1)  # warp, epoch and program of the last
        self.written = self.writes[1]  # -1: not yet; 0: before the launch, or by a copy
        self.written[:] = 0 if name == "global" else -1

    def locate(self, addresses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (accesses,) the cell of each access, and (accesses, granules) its record."""
        span = np.maximum(np.searchsorted(self.begins, addresses, "right") - 1, 0)
        if (outside := (addresses < self.begins[span]) | (addresses + width > self.ends[span])).any():
            beyond = int((addresses - self.ends[span])[outside][0])
            raise Fault(f"an access to {width} bytes of {self.name} memory, {beyond} bytes after its end")
        forbid(addresses % width, f"a misaligned access to {width} bytes of {self.name} memory")
        record = (addresses - self.begins[span] + self.offsets[span]) // self.granule
        return (addresses - self.low) // width, record[:, None] + np.arange(-(-width // self.granule))

    def cells(self, width: int) -> np.ndarray:
        return self.content[: len(self.content) // width * width].view(f"V{width}")

    def read(self, threads: Threads, lanes: np.ndarray, addresses: np.ndarray, width: int) -> np.ndarray:
        """Return (lanes, width) uint8."""
        cell, at = self.locate(addresses, width)
        self.check_written(at)
        who = warp, epoch, program = threads.who[:, lanes, None]
        self._forbid(self.writes, at, who, True, "reads what another has written")
        last_warp, last_epoch, last_program = self.reads.take(at, 1)
        self.reads[0][at] = np.where((last_epoch == epoch) & (last_warp != warp), MANY, warp)
        self.reads[1][at] = epoch
        self.reads[2][at] = np.where((last_program == -1) | (last_program == program), program, MANY)
        return self.cells(width)[cell].view(np.uint8).reshape(len(lanes), width)

    def write(self, threads: Threads, lanes: np.ndarray, addresses: np.ndarray, data: np.ndarray) -> None:
        """Write (lanes, width) uint8."""
        width = data.shape[1]
        cell, at = self.locate(addresses, width)
        cells = self.cells(width)
        changes = (cells[cell].view(np.uint8).reshape(data.shape) != data).any(1)
        self.claim(threads, lanes, at, changes[:, None])
        cells[cell] = np.ascontiguousarray(data).view(f"V{width}")[:, 0]
        lost = (cells[cell].view(np.uint8).reshape(data.shape) != data).any(1)
        # Lanes may share a sum whose last bit differs, as a product is fused into it: one of them wins.
        apart = (self.name == "global") | (self.writes[0][at] != threads.who[0, lanes, None]).any(1)
        forbid(lost & apart, f"two threads write different values to one place in {self.name} memory")

    def claim(self, threads: Threads, lanes: np.ndarray, at: np.ndarray, changes: Any = True) -> None:
        """Record a write; a fault if it changes what another warp or program depends on."""
        who = threads.who[:, lanes, None]
        self._forbid(self.writes, at, who, changes, "writes what another has written")
        self._forbid(self.reads, at, who, changes, "overwrites what another has read")
        self.writes[:, at] = who

    def _forbid(self, last: np.ndarray, at: np.ndarray, who: Any, changes: Any, what: str) -> None:
        """Raise a fault where the last access was another program's, or another warp's since the barrier."""
        (warp, epoch, program), (last_warp, last_epoch, last_program) = who, last.take(at, 1)
        forbid(changes & (last_program != -1) & (last_program != program), f"a program {what}")
        raced = changes & (last_epoch == epoch) & (last_warp != warp)
        forbid(raced, f"a warp {what} since the barrier, in {self.name} memory")

    def check_written(self, at: np.ndarray) -> None:
        unwritten = self.written[at] < 0
        forbid(unwritten, f"{self.name} memory is read before it is written, or before a copy has arrived")


def memory_of(threads: Threads, code: Instruction, operand: str) -> tuple[Memory, np.ndarray]:
    """Return the memory of an instruction, and (lanes,) addresses in it."""
    lanes, addresses = threads.lanes, threads.address(operand)
    if code.parts[1] == "global":
        return threads.launch.memory, addresses[lanes]
    return threads.shared, (threads.base + addresses)[lanes]


def load(threads: Threads, code: Instruction) -> None:
    if code.parts[1] == "param":
        return threads.write(code.operands[0], threads.read(code.operands[1], code.kind))
    (memory, addresses), dtype = memory_of(threads, code, code.operands[1]), DTYPES[code.kind]
    width = len(names(code.operands[0])) * dtype.itemsize
    data = memory.read(threads, threads.lanes, addresses, width)
    return threads.write_columns(code.operands[0], data.view(dtype))


def store(threads: Threads, code: Instruction) -> None:
    memory, addresses = memory_of(threads, code, code.operands[0])
    data = threads.columns(code.operands[1], code.kind).view(np.uint8)
    memory.write(threads, threads.lanes, addresses, data)


def atomic(threads: Threads, code: Instruction) -> None:
    result, place, operand = code.operands
    memory, addresses = memory_of(threads, code, place)
    values = threads.columns(operand, code.kind)[:, 0]
    function = next(FUNCTIONS[part] for part in code.parts if part in FUNCTIONS)
    cell, _ = memory.locate(addresses, values.itemsize)
    cells, before = memory.cells(values.itemsize).view(values.dtype), np.empty_like(values)
    for i, at in enumerate(cell.tolist()):
        before[i] = cells[at]
        cells[at] = function(before[i], values[i])
    threads.write_columns(result, before[:, None])


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
STEPS = {"ld": load, "st": store, "atom": atomic}
STEPS |= {"mbarrier": synchronize, "cp": lambda threads, code: COPIES[code.parts[2]](threads, code)}
