"""What a compiled kernel's machine code says: its resources, and how many instructions its loops take.

NVIDIA's is disassembled by the tools in Triton's wheel; of AMD's, Triton keeps the assembler's text.

A *K-step* is the shortest way round the control flow through a tensor core instruction. The *epilogue* is the
rest of the loop around it: what a persistent program pays for a tile besides the K-steps, its position
included. Without a product the step is the largest loop.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from grpo_fast.head.tuning import SHARED_MEMORY

_WARPS_AND_PROGRAMS = {
    "sm_80": (64, 32), "sm_86": (48, 16), "sm_89": (48, 24), "sm_90": (64, 32), "sm_100": (64, 32),
    "sm_120": (48, 24), "gfx942": (32, 32), "gfx950": (32, 32),
}  # fmt: skip
"""What a multiprocessor holds at most, by architecture."""

_RESERVED = 1024  # bytes of shared memory that NVIDIA's driver takes from each program
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?(\w+)(.*?);")
_JUMPS = ("BRA", "JMP", "CALL")
_ENDS = ("BRA", "JMP", "BRX", "RET", "EXIT")


class Loops(NamedTuple):
    """Instructions that a warp has before it."""

    instructions: int  # of the whole kernel
    step: int
    epilogue: int


def read(cubin: bytes, *, disassemble: bool = False) -> tuple[int, int, int, Loops]:
    """Registers per thread, instructions that spill, static shared bytes and loops of a one-kernel cubin.

    Disassembly takes half a second; without it the loops are zero. A stack need not be used.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = cuobjdump("-res-usage", file.name)
        usage = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|SHARED):(\d+)", text)}
        sass = cuobjdump("-sass", file.name) if disassemble or usage["STACK"] else ""
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return usage["REG"], spills, usage["SHARED"], loops(sass)


def read_amd(assembler: str) -> tuple[int, int, int, Loops]:
    """As `read`, of a kernel's text; its loops are zero. Registers are vector registers, with those of sums;
    what is moved between the two is not counted as spilled.
    """
    facts = {name: int(n) for name, n in re.findall(r"\.(\w+):\s+(\d+)$", assembler, re.MULTILINE)}
    instructions = len(re.findall(r"^\t[a-z]+_\w+", assembler, re.MULTILINE))
    spills = facts["vgpr_spill_count"] if facts["private_segment_fixed_size"] else 0
    return facts["vgpr_count"], spills, facts["group_segment_fixed_size"], Loops(instructions, 0, 0)


def loops(sass: str) -> Loops:
    """Of what `cuobjdump -sass` prints."""
    import networkx

    code = [(int(at, 16), guard, opcode, rest) for at, guard, opcode, rest in _LINE.findall(sass)]
    place = {at: i for i, (at, *_) in enumerate(code)}
    flow = networkx.DiGraph()
    for i, (_, guard, opcode, operands) in enumerate(code):
        if opcode in _JUMPS and (target := re.search(r"0x([0-9a-f]+)\s*$", operands)):
            flow.add_edge(i, place[int(target[1], 16)])
        if (guard or "," in operands or opcode not in _ENDS) and i + 1 < len(code):
            flow.add_edge(i, i + 1)
    instructions = sum(opcode != "NOP" for _, _, opcode, _ in code)
    rounds: dict[int, int] = {}  # steps from a product to itself
    for i in (i for i, (_, _, opcode, _) in enumerate(code) if opcode.endswith("MMA") and i in flow):
        steps_to = dict(networkx.single_target_shortest_path_length(flow, i))
        if ways := [1 + steps_to[after] for after in flow.successors(i) if after in steps_to]:
            rounds[i] = min(ways)
    parts = [part for part in networkx.strongly_connected_components(flow) if len(part) > 1]
    if not rounds:
        return Loops(instructions, max(map(len, parts), default=0), 0)
    product = min(rounds, key=rounds.__getitem__)
    around = next(part for part in parts if product in part)
    return Loops(instructions, rounds[product], len(around) - rounds[product])


def resident_programs(architecture: str, warps: int, registers: int, shared: int) -> int:
    """Programs of a kernel that one multiprocessor holds at a time: CTAs an SM."""
    most_warps, most = _WARPS_AND_PROGRAMS[architecture]
    # A warp's registers come from one of four files of 512 for each of 32 or, AMD's, 64 threads.
    by_registers = 4 * (512 // (-(-max(registers, 1) // 8) * 8)) // warps
    reserved = 0 if architecture.startswith("gfx") else _RESERVED
    by_shared = (SHARED_MEMORY[architecture] + reserved) // max(shared + reserved, 1)
    return min(most, most_warps // warps, by_registers, by_shared)


def cuobjdump(*arguments: str) -> str:
    """What the disassembler in Triton's wheel prints."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = os.pathsep.join([str(tool.parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [tool, *arguments], capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
    ).stdout
