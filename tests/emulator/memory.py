"""Global and shared memory: what may be accessed, and which warps meet at a byte with no barrier."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .ptx import DTYPES, Fault, Instruction, names
from .threads import Threads

MANY = -2  # warps or programs; -1 is none
ATOMIC = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}


class Memory:
    """Spans of addresses, and by granule which warp wrote or read them last, and in which epoch.

    Warps run in any order between two barriers, and programs in any order: it is a fault if that matters.
    Writing what is there already is none: layouts are replicated. Atomic operations are not recorded.
    """

    def __init__(
        self, name: str, spans: list[tuple[int, int]], granule: int, warps: int, written: bool
    ) -> None:
        self.name, self.granule, self.warps = name, granule, warps
        spans = sorted((begin, begin + size) for begin, size in set(spans) if size)
        self.begins, self.ends = np.array(spans).T
        sizes = (self.ends - self.begins + 15) // 16 * 16
        self.offsets = np.cumsum(sizes) - sizes  # in the record of accesses
        self.low = int(self.begins[0]) // 16 * 16
        everything = ctypes.c_uint8 * ((int(self.ends.max()) - self.low + 15) // 16 * 16)
        self.content = np.frombuffer(everything.from_address(self.low), np.uint8)
        count = int(sizes.sum()) // granule
        self.written = np.full(count, 0 if written else -1)  # the epoch; -1: nobody has
        self.writer, self.reader, self.read_in, self.program = np.full((4, count), -1)

    def locate(self, addresses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (accesses,) the cell of each access, and (accesses, granules) its record."""
        span = np.maximum(np.searchsorted(self.begins, addresses, "right") - 1, 0)
        if (outside := (addresses < self.begins[span]) | (addresses + width > self.ends[span])).any():
            beyond = int((addresses - self.ends[span])[outside][0])
            raise Fault(f"an access to {width} bytes of {self.name} memory, {beyond} bytes after its end")
        if (addresses % width).any():
            raise Fault(f"a misaligned access to {width} bytes of {self.name} memory")
        record = (addresses - self.begins[span] + self.offsets[span]) // self.granule
        return (addresses - self.low) // width, record[:, None] + np.arange(-(-width // self.granule))

    def cells(self, width: int) -> np.ndarray:
        return self.content[: len(self.content) // width * width].view(f"V{width}")

    def read(self, threads: Threads, lanes: np.ndarray, addresses: np.ndarray, width: int) -> np.ndarray:
        """Return (lanes, width) uint8."""
        cell, at = self.locate(addresses, width)
        warp, epoch = threads.warp[lanes, None], threads.epoch[lanes, None]
        self.check_written(at)
        writer, written = self.writer[at], self.written[at]
        if ((written == epoch) & (writer != warp)).any():
            raise Fault(f"{self.name} memory is read that another warp has written since the barrier")
        if ((writer >= 0) & (writer // self.warps != warp // self.warps)).any():
            raise Fault("a program reads what another has written")
        self.reader[at] = np.where((self.read_in[at] == epoch) & (self.reader[at] != warp), MANY, warp)
        self.read_in[at] = epoch
        program, before = warp // self.warps, self.program[at]
        self.program[at] = np.where((before == -1) | (before == program), program, MANY)
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
        if (lost & ((self.name == "global") | (self.writer[at] != threads.warp[lanes, None]).any(1))).any():
            raise Fault(f"two threads write different values to one place in {self.name} memory")

    def claim(self, threads: Threads, lanes: np.ndarray, at: np.ndarray, changes: Any = True) -> None:
        """Record a write; a fault if it changes what another warp or program depends on."""
        warp, epoch = threads.warp[lanes, None], threads.epoch[lanes, None]
        program, writer, reader = warp // self.warps, self.writer[at], self.program[at]
        if (changes & (self.written[at] == epoch) & (writer != warp)).any():
            raise Fault(f"two warps write one byte of {self.name} memory between barriers")
        if (changes & (self.read_in[at] == epoch) & (self.reader[at] != warp)).any():
            raise Fault(f"{self.name} memory is overwritten that another warp has read since the barrier")
        if (changes & (writer >= 0) & (writer // self.warps != program)).any():
            raise Fault("two programs write one byte")
        if (changes & (reader != -1) & (reader != program)).any():
            raise Fault("a program overwrites what another has read")
        self.writer[at], self.written[at] = warp, epoch

    def check_written(self, at: np.ndarray) -> None:
        if (self.written[at] < 0).any():
            raise Fault(f"{self.name} memory is read before it is written, or before a copy has arrived")


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
    function = next(ATOMIC[part] for part in code.parts if part in ATOMIC)
    cell, _ = memory.locate(addresses, values.itemsize)
    cells, before = memory.cells(values.itemsize).view(values.dtype), np.empty_like(values)
    for i, at in enumerate(cell.tolist()):
        before[i] = cells[at]
        cells[at] = function(before[i], values[i])
    if result:
        threads.write_columns(result[0], before[:, None])


STEPS = {"ld": load, "st": store, "atom": atomic, "red": atomic}
