"""Global and shared memory: what may be accessed, and which warps meet at a byte with no barrier."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .alu import FUNCTIONS
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
    *result, place, operand = code.operands
    memory, addresses = memory_of(threads, code, place)
    values = threads.columns(operand, code.kind)[:, 0]
    function = next(FUNCTIONS[part] for part in code.parts if part in FUNCTIONS)
    cell, _ = memory.locate(addresses, values.itemsize)
    cells, before = memory.cells(values.itemsize).view(values.dtype), np.empty_like(values)
    for i, at in enumerate(cell.tolist()):
        before[i] = cells[at]
        cells[at] = function(before[i], values[i])
    if result:
        threads.write_columns(result[0], before[:, None])


STEPS = {"ld": load, "st": store, "atom": atomic, "red": atomic}
