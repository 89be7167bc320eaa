"""Threads of several programs in lockstep: their registers, where they are, what diverts or stops them."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .ptx import DTYPES, Fault, Instruction, Kernel, constant, names

if TYPE_CHECKING:
    from .launch import Launch

LANES = 32
END = 1 << 60
PATIENCE = 20_000_000  # instructions after which a program is taken to hang
UNDEFINED = 0x7FF9_DEAD_7FC0_BEEF  # what a register holds before it is written: a NaN of any width

SPECIAL = {"%tid.x": lambda threads: threads.index}
SPECIAL |= {f"%ctaid.{axis}": lambda threads, i=i: threads.program[:, i] for i, axis in enumerate("xyz")}
SPECIAL |= {f"%nctaid.{axis}": lambda threads, i=i: threads.grid[i : i + 1] for i, axis in enumerate("xyz")}


class Threads:
    """Thread i is lane i % 32 of its warp. Threads at one instruction execute it together.

    Of threads at different instructions those at the earliest run first, so they meet again where their
    paths join. A register holds (threads,) numbers, or (1,) if they are equal.
    """

    def __init__(self, launch: Launch, programs: list[tuple[int, ...]]) -> None:
        self.launch, self.size = launch, LANES * launch.warps
        self.count, self.grid = len(programs) * self.size, np.array(launch.grid)
        self.program = np.repeat(np.array(programs), self.size, 0)  # (threads, 3)
        self.slot = np.repeat(np.arange(len(programs)), self.size)
        self.index = np.tile(np.arange(self.size), len(programs))  # within the program
        number = np.ravel_multi_index(self.program.T, launch.grid)
        self.warp = number * launch.warps + self.index // LANES
        self.registers: dict[str, np.ndarray] = {}
        self.counters = np.zeros(self.count, np.int64)
        self.alive, self.waiting, self.parked = np.array([[True], [False], [False]]).repeat(self.count, 1)
        self.group: np.ndarray | None = None  # of threads at this instruction; None: all that have not ended
        self.mask: np.ndarray | None = None  # those whose guard is true, too
        self.pc = self.limit = self.executed = 0
        self.epoch = np.zeros(self.count, np.int64)  # a new number after every barrier
        self._enter_epoch(self.alive)
        self.shared, self.base = launch.shared_memory(self.slot)
        self.barriers: dict[tuple[int, int], Any] = {}  # mbarriers, by program and address
        self.copies: list[Any] = []  # under way
        self.committed = np.zeros(self.count, np.int64)  # groups of copies

    def run(self) -> None:
        kernel, code = self.launch.kernel, None
        try:
            while self._choose():
                group = self.acting
                while self.pc < self.limit:
                    step, code = kernel.steps[self.pc]
                    self.pc += 1
                    self.mask = self.read(code.guard, "pred") & group if code.guard else self.group
                    if not code.guard or self.mask.any():
                        step(self, code)
                    self.executed += 1
                    if self.executed > PATIENCE:
                        raise Fault(f"hangs: it has executed {PATIENCE} instructions")
                if self.limit >= 0:
                    self.counters[group] = self.pc
        except Fault as fault:
            raise Fault(f"{kernel.name}: {fault} (`{code.text}`)") from None
        except Exception as error:
            raise RuntimeError(f"the emulator cannot execute `{code.text}` of {kernel.name}") from error

    def _choose(self) -> bool:
        """Let the threads at the earliest instruction run; return False if all have ended."""
        while not (ready := self.alive & ~self.waiting & ~self.parked).any():
            if not self.alive.any():
                return False
            self._release()
        counters = np.where(ready, self.counters, END)
        self.pc = int(counters.min())
        group = counters == self.pc
        self.limit = int(counters[~group].min(initial=END))
        self.group = self.mask = None if np.array_equal(group, self.alive) else group
        return True

    def _release(self) -> None:
        """Let the programs continue whose threads all wait at a barrier."""
        state = self.alive, self.waiting, self.counters
        alive, waiting, counters = (each.reshape(-1, self.size) for each in state)
        whole = alive.any(1) & (waiting | ~alive).all(1)
        if not whole.any():
            raise Fault("hangs: it waits for an mbarrier that nothing completes")
        if not alive[whole].all() or (counters[whole] != counters[whole, :1]).any():
            raise Fault("hangs: not all threads of a program reach this barrier")
        released = whole.repeat(self.size)
        self._enter_epoch(released)
        self.waiting &= ~released

    def _enter_epoch(self, mask: np.ndarray) -> None:
        self.epoch[mask] = self.launch.epoch + self.slot[mask]
        self.launch.epoch += self.count // self.size

    @property
    def acting(self) -> np.ndarray:
        """(threads,) of bool: those that execute this instruction."""
        return self.alive if self.mask is None else self.mask

    @property
    def lanes(self) -> np.ndarray:
        """The indices of those threads."""
        return np.flatnonzero(self.acting)

    def read(self, operand: str, kind: str) -> np.ndarray:
        return _reader(self.launch.kernel, operand, kind)(self)

    def each(self, operand: str, kind: str) -> np.ndarray:
        """(threads,) of an operand."""
        value = self.read(operand, kind)
        return value if len(value) == self.count else np.repeat(value, self.count)

    def columns(self, operand: str, kind: str) -> np.ndarray:
        """(lanes, registers) of `{%r1, %r2}`."""
        return np.stack([self.each(name, kind) for name in names(operand)], 1)[self.lanes]

    def write(self, name: str, value: np.ndarray) -> None:
        """Write a register, extended by its sign to the register's width."""
        if name == "_":
            return
        register = self.launch.kernel.register(name)
        if value.itemsize != register.itemsize:
            value = value.astype(f"{value.dtype.kind}{register.itemsize}")
        value = value.view(register)
        if self.mask is not None:
            value = np.where(self.mask, value, self.registers.get(name, np.zeros(1, register)))
        self.registers[name] = value

    def write_columns(self, operand: str, values: np.ndarray) -> None:
        """Write (lanes, registers) into `{%r1, %r2}`."""
        full = values
        if len(values) < self.count:
            full = np.zeros((self.count, values.shape[1]), values.dtype)
            full[self.lanes] = values
        for name, value in zip(names(operand), full.T, strict=True):
            self.write(name, value)

    def address(self, operand: str) -> np.ndarray:
        """(threads,) int64 of `[%rd1 + 4]`."""
        base, offset = re.fullmatch(r"\[\s*(\S+?)\s*(?:\+\s*(-?\w+)\s*)?\]", operand).groups("0")
        wide = self.launch.kernel.register(base) == np.uint64
        return self.each(base, "s64" if wide else "u32").astype(np.int64) + int(offset, 0)

    def divert(self, code: Instruction) -> None:
        target = self.launch.kernel.labels[code.operands[0]]
        if self.mask is None or np.array_equal(self.mask, self.alive if self.group is None else self.group):
            self.pc = target
        else:
            self.scatter()
            self.counters[self.mask] = target

    def scatter(self) -> None:
        """Choose anew who runs, after this instruction."""
        self.counters[self.alive if self.group is None else self.group] = self.pc
        self.limit = -1

    def leave(self, code: Instruction) -> None:
        self.scatter()
        self.alive = self.alive & ~self.acting

    def wait(self, code: Instruction) -> None:
        """Wait until all threads of the program do."""
        if code.parts[1] == "warp":
            return
        if code.operands != ("0",):
            raise Fault("the emulator has barrier 0 of all threads only")
        if self.mask is None and self.alive.all():
            self._enter_epoch(self.alive)
        else:
            self.scatter()
            self.waiting |= self.acting


@cache
def _reader(kernel: Kernel, operand: str, kind: str) -> Any:
    """Return what reads an operand of some threads: cached, as its text is parsed for each kind once."""
    dtype = DTYPES[kind]
    if operand.startswith("!"):
        return lambda threads: ~threads.read(operand[1:], kind)
    if (value := constant(str(kernel.symbols.get(operand, operand)), dtype)) is not None:
        return lambda threads: value
    if parameter := re.fullmatch(r"\[?\w+_param_(\d+)(?:\+(\d+))?\]?", operand):
        index, offset = map(int, parameter.groups("0"))
        return lambda threads: np.frombuffer(threads.launch.arguments[index], dtype, 1, offset)
    if operand in SPECIAL:
        return lambda threads: SPECIAL[operand](threads).astype(dtype)
    register = kernel.register(operand)
    undefined = np.array([UNDEFINED]).astype(register)
    width = register if register.itemsize == dtype.itemsize else np.dtype(f"u{dtype.itemsize}")
    return lambda threads: threads.registers.get(operand, undefined).astype(width, copy=False).view(dtype)


STEPS = {"bra": Threads.divert, "ret": Threads.leave, "bar": Threads.wait, "fence": lambda *_: None}
