"""PTX as a compiler writes it: statements, labels, registers and constants."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

SPECIAL = ["%tid.x", *(f"%{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz")]
DTYPES = {f"{p}{8 * n}": np.dtype(f"{k}{n}") for n in (1, 2, 4, 8) for p, k in ("bu", "uu", "si")}
DTYPES |= {f"f{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)} | {"pred": np.dtype(bool)}

_WAIT = re.compile(  # a loop with names of its own
    r"\{\s*\.reg \.pred complete;\s*(?:@!(%p\d+) bra\.uni skipWait;\s*)?waitLoop:\s*"
    r"mbarrier\.try_wait\S+\s+complete, (.*?);.*?\}",
    re.S,
)


class Fault(AssertionError):
    """What a kernel must not do, or what the emulator cannot do."""


def forbid(wrong: Any, message: str) -> None:
    """Raise a fault if any element is true."""
    if np.count_nonzero(wrong):  # faster than np.any
        raise Fault(message)


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 st.global.b32 [%rd1 + 4], {%r1};` has the guard `!%p1`, three parts and two operands."""

    text: str
    guard: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.parts[-1]


@dataclass(eq=False)
class Kernel:
    """One entry of a PTX file."""

    name: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=lambda: {"global_smem": 0})  # in shared memory
    registers: dict[str, np.dtype] = field(  # by prefix
        default_factory=lambda: dict.fromkeys(SPECIAL, np.dtype(np.uint32))
    )

    def register(self, name: str) -> np.dtype | None:
        """Return the type of a register: unsigned or bool; None if it is not declared."""
        return self.registers.get(name.rstrip("0123456789"))


def names(operand: str) -> list[str]:
    """Return the registers of `{%r1, %r2}` or `%r1|%p1`, or the only one."""
    return [name.strip() for name in re.split(r"[,|]", operand.strip("{} "))]


def constant(text: str, dtype: np.dtype) -> np.ndarray | None:
    """Return (1,) of a number, or None if the text is not one."""
    if re.fullmatch(r"-?(?:0x[0-9a-fA-F]+|\d+)U?", text):
        number = int(text.rstrip("U"), 0)
        bits = number != 0 if dtype.kind == "b" else number & (1 << 8 * dtype.itemsize) - 1
        return np.array([bits], f"u{dtype.itemsize}").view(dtype)
    if digits := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", text):
        return np.array([int(digits[2], 16)], "u4" if digits[1] in "fF" else "u8").view(dtype)
    return None


@cache
def parse(ptx: str) -> Kernel:
    """Return the first kernel of a PTX file.

    The loop that waits for an mbarrier becomes one instruction, `mbarrier.wait`.
    """
    text = re.sub(r"//.*|^\s*\.(?:loc|file|section)\b.*", "", ptx, flags=re.M)
    text = _WAIT.sub(lambda found: f"{'@' + found[1] if found[1] else ''} mbarrier.wait {found[2]};", text)
    name, body = re.search(r"\.entry\s+(\w+)\(.*?\).*?\{(.*?)^\}", text, re.S | re.M).groups()
    kernel, room = Kernel(name), 0
    for statement in body.split(";"):
        while label := re.match(r"[\s}]*(\$\w+):", statement):
            kernel.labels[label[1]] = len(kernel.code)
            statement = statement[label.end() :]
        statement = statement.lstrip("{} \n\t")
        if register := re.match(r"\.reg\s+\.(\w+)\s+(%[a-z]+)", statement):
            dtype = DTYPES[register[1]]
            kernel.registers[register[2]] = dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")
        elif shared := re.match(r"\.shared .*?(\w+)\[(\d+)\]", statement):
            kernel.symbols[shared[1]], room = room, room + int(shared[2])
        elif found := re.match(r"(?:@(!?%\w+)\s+)?([a-z]\S*)\s*(.*)", statement, re.S):
            operands = re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s][^,]*", found[3])
            operands, parts = tuple(each.strip() for each in operands), tuple(found[2].split("."))
            kernel.code.append(Instruction(" ".join(statement.split()), found[1] or "", parts, operands))
    return kernel
