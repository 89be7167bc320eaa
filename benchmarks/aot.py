"""`python -m benchmarks.aot`: what the compiler makes of every kernel we ship, without a GPU.

Nothing is listed twice: each case calls the launcher that the head calls, on meta tensors of a real shape,
while Triton compiles for the named architecture and launches nothing. The kernels, tile sizes, warps,
stages and argument specialisations are therefore the shipped ones, and a launcher that needs the host to
know a device value fails here.

Registers, spills and the tensor core instructions are read off the machine code by the `cuobjdump` that
comes with Triton. Run it in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_fast.head.tuning import SHARED_MEMORY

from .aot_cases import shipped_cases

TENSOR_CORE = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
"""Instruction by which a half precision `tl.dot` reaches the tensor cores at their full rate."""


@dataclass(frozen=True)
class Report:
    """One compiled kernel."""

    case: str  # the launcher's call
    kernel: str
    config: str  # constexprs, warps, stages
    capability: int
    registers: int  # per thread
    spills: int  # local memory instructions
    shared: int  # bytes per program, static and dynamic
    dots: int  # tl.dot in the source, after specialisation, of half precision operands
    tensor_core: int  # tensor core instructions of the expected kind
    narrow: int = 0  # instructions that move 16 bits a thread to or from global memory

    def faults(self) -> list[str]:
        """What keeps this kernel from shipping; empty when nothing does."""
        found = []
        if self.spills:
            found.append(f"spills ({self.spills} local memory instructions)")
        if self.shared > SHARED_MEMORY[self.capability]:
            found.append(f"shared memory {self.shared} > {SHARED_MEMORY[self.capability]}")
        if self.dots and not self.tensor_core:
            found.append(f"no {TENSOR_CORE[self.capability]} for a tl.dot")
        return found


class OfflineDriver:
    """Stands in for Triton's driver where there is no GPU: it names a target and has nothing to launch on."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextmanager
def compile_only(capability: int) -> Iterator[list[tuple[Any, Any, dict[str, Any]]]]:
    """Inside, `kernel[grid](...)` compiles and launches nothing. Yields what was compiled so far."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise RuntimeError("ahead-of-time compilation needs a process without TRITON_INTERPRET=1: unset it")
    compiled: list[tuple[Any, Any, dict[str, Any]]] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        binary = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self, binary, options))
        return binary

    previous, JITFunction.run = driver._active, record
    driver.set_active(OfflineDriver(capability))
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = previous


def inspect(case: str, function: Any, binary: Any, options: dict[str, Any], capability: int) -> Report:
    """Reads the machine code of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        code = _cuobjdump("-res-usage", "-sass", file.name)
    registers, static_shared = (int(_found(rf"\b{name}:(\d+)", code)) for name in ("REG", "SHARED"))
    metadata = binary.metadata
    constants = {name: value for name, value in options.items() if name.isupper() and isinstance(value, int)}
    constants |= {"warps": metadata.num_warps, "stages": metadata.num_stages}
    return Report(
        case=case,
        kernel=function.fn.__name__,
        config=" ".join(f"{name}={int(value)}" for name, value in constants.items()),
        capability=capability,
        registers=registers,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
        shared=max(metadata.shared, static_shared),
        dots=len(re.findall(r"tt\.dot .*tensor<\d+x\d+xb?f16", binary.asm["ttir"])),
        tensor_core=len(re.findall(rf"\b{TENSOR_CORE[capability]}\b", code)),
        narrow=len(re.findall(r"\b(?:LDG|STG)\.E\.[US]16\b", code)),
    )


def _cuobjdump(*arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = os.pathsep.join([str(tool.parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [tool, *arguments], capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
    ).stdout


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no {pattern!r}:\n{text}")
    return match.group(1)


def reports(capability: int, cases: dict[str, Callable[[], None]]) -> list[Report]:
    """Compiles every case and reports each distinct kernel once."""
    seen: dict[str, Report] = {}
    for case, launch in cases.items():
        with compile_only(capability) as compiled:
            launch()
        for function, binary, options in compiled:
            if binary.hash not in seen:
                seen[binary.hash] = inspect(case, function, binary, options, capability)
    return list(seen.values())


def table(rows: list[Report]) -> str:
    lines = [
        "| case | kernel | configuration | registers | spills | shared | tensor core | ships |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.case, f"`{row.kernel}`", row.config, row.registers, row.spills, f"{row.shared:,}")
        tensor_core = f"{row.tensor_core} {TENSOR_CORE[row.capability]}" if row.dots else "no dot"
        verdict = "; ".join(row.faults()) or "yes"
        lines.append("| " + " | ".join(map(str, (*cells, tensor_core, verdict))) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    import triton

    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, choices=sorted(SHARED_MEMORY), default=90)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args(arguments)
    cases = {name: run for name, run in shipped_cases(options.capability).items() if options.only in name}
    rows = reports(options.capability, cases)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(f"Compiled for sm_{options.capability} by Triton {triton.__version__}; nothing was run.\n")
        print(table(rows))
    return 1 if any(row.faults() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
