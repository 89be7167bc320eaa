"""Threads of several programs in lockstep: their registers, where they are, what diverts or stops them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .ptx import DTYPES, SPECIAL, Fault, Instruction, Kernel, constant, forbid, names

if TYPE_CHECKING:
    from .launch import Launch

LANES = 32
END = 1 << 60
PATIENCE = 20_000_000  # instructions after which a program is taken to hang
UNDEFINED = 0x7FF9_DEAD_7FC0_BEEF  # what a register holds before it is written: a NaN of any width


class Threads:
    """Thread i is lane i % 32 of its warp. Threads at one instruction execute it together.

    Of threads at different instructions those at the earliest run first, so they meet again where their
    paths join. A register holds (threads,) numbers, or (1,) if they are equal.
    """

    def __init__(self, launch: Launch, programs: list[tuple[int, ...]]) -> None:
        self.launch, self.size = launch, LANES * launch.warps
        self.count = len(programs) * self.size
        self.slot, index = np.divmod(np.arange(self.count), self.size)  # the program, and the thread in it
        program = np.array(programs)[self.slot].T
        number = np.ravel_multi_index(program, launch.grid)
        warp = number * launch.warps + index // LANES
        self.who = np.stack([warp, np.ones_like(warp), number])  # warp, epoch (a count of barriers), program
        special = index, *program, *np.array(launch.grid)[:, None]
        self.registers = {name: each.astype(np.uint32) for name, each in zip(SPECIAL, special, strict=True)}
        self.counters = np.zeros(self.count, np.int64)
        self.alive, self.waiting, self.parked = np.array([[True], [False], [False]]).repeat(self.count, 1)
        self.group = self.acting = self.alive  # who is at this instruction; those whose guard is true, too
        self.pc = self.limit = self.executed = 0
        self.shared, self.base = launch.shared_memory(self.slot)
        self.barriers: dict[tuple[int, int], Any] = {}  # mbarriers, by program and address
        self.copies: list[Any] = []  # under way
        self.committed = np.zeros(self.count, np.int64)  # groups of copies

    def run(self, steps: dict[str, Callable[[Threads, Instruction], None]]) -> None:
        """Execute the kernel; `steps` has a function for each instruction's first part."""
        kernel, code = self.launch.kernel, None
        try:
            while self._choose():
                while self.pc < self.limit:
                    code = kernel.code[self.pc]
                    self.pc += 1
                    self.acting = self.read(code.guard, "pred") & self.group if code.guard else self.group
                    if not code.guard or self.acting.any():
                        steps[code.parts[0]](self, code)
                    self.executed += 1
                    if self.executed > PATIENCE:
                        raise Fault(f"hangs: it has executed {PATIENCE} instructions")
                if self.limit >= 0:
                    self.counters[self.group] = self.pc
        except Exception as error:
            problem = error if isinstance(error, Fault) else f"the emulator cannot execute it: {error!r}"
            raise Fault(f"{kernel.name}: {problem} (`{code.text}`)") from error

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
        self.group = self.alive if np.array_equal(group, self.alive) else group
        return True

    def _release(self) -> None:
        """Let the programs continue whose threads all wait at a barrier."""
        state = self.alive, self.waiting, self.counters
        alive, waiting, counters = (each.reshape(-1, self.size) for each in state)
        whole = alive.any(1) & (waiting | ~alive).all(1)
        forbid(not whole.any(), "hangs: it waits for an mbarrier that nothing completes")
        missing = ~alive | (counters != counters[:, :1])
        forbid(missing[whole], "hangs: not all threads of a program reach this barrier")
        released = whole.repeat(self.size)
        self.waiting &= ~released
        self.who[1] += released

    @property
    def lanes(self) -> np.ndarray:
        """The indices of the threads that execute this instruction."""
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
        if self.acting is not self.alive:
            value = np.where(self.acting, value, self.registers.get(name, np.zeros(1, register)))
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
        if np.array_equal(self.acting, self.group):
            self.pc = target
        else:
            self.scatter()
            self.counters[self.acting] = target

    def scatter(self) -> None:
        """Choose anew who runs, after this instruction."""
        self.counters[self.group] = self.pc
        self.limit = -1

    def leave(self, code: Instruction) -> None:
        self.scatter()
        self.alive = self.alive & ~self.acting

    def wait(self, code: Instruction) -> None:
        """Wait until all threads of the program do."""
        if code.parts[1] != "warp":
            forbid(code.operands != ("0",), "the emulator has barrier 0 of all threads only")
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
    register = kernel.register(operand)
    undefined = np.array([UNDEFINED]).astype(register)
    width = register if register.itemsize == dtype.itemsize else np.dtype(f"u{dtype.itemsize}")
    return lambda threads: threads.registers.get(operand, undefined).astype(width, copy=False).view(dtype)


STEPS = {"bra": Threads.divert, "ret": Threads.leave, "bar": Threads.wait, "fence": lambda *_: None}
