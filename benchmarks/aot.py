"""`python -m benchmarks aot`: what the compiler makes of every kernel we ship, without a GPU.

Nothing is listed twice: each case runs the head or the policy loss on meta tensors of a real shape, while
Triton compiles for the named architecture and launches nothing. The kernels, tile sizes, warps, stages and
argument specialisations are therefore the shipped ones.

It fails on what keeps a kernel from shipping, and on what grew by more than 5 % and 4 over the record of this
minor version of Triton in `results/`, which --record writes; a version without a record is held to the faults
alone. Run it in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from grpo_fast.head.tuning import SHARED_MEMORY

from . import dry_head
from .dry_head import Batch, meta, step
from .machine_code import read, resident_programs

TENSOR_CORE = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
"""PTX by which a half precision `tl.dot` reaches the tensor cores at their full rate."""
COUNTS = ("registers", "spills", "shared", "ctas", "step", "epilogue", "instructions")
"""What the record holds of a kernel."""


# What is launched -----------------------------------------------------------------------------------------


def policy_loss(options: dict[str, Any], tokens: int = 16_384, sequences: int = 64) -> None:
    """The policy loss with these fields of its configuration."""
    from grpo_fast.kernels.policy_loss import policy_loss as launch

    from grpo_fast.head.fused_loss import loss_constants
    from grpo_fast.objective import GRPOLossConfig

    config = GRPOLossConfig(**options)
    row, ids, mask = (meta(tokens, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.bool))
    reference, sampler = (row if given else None for given in (config.needs_reference, config.needs_sampler))
    launch(row, row, ids, mask, row, reference, sampler, row, sequences, loss_constants(config, None))


_ALL = Batch(bias=True, temperature=True, softcap=30.0)
BATCHES = {
    "bfloat16": Batch(),
    "float16": Batch(dtype=torch.float16),
    "float32": Batch(dtype=torch.float32),
    "H=1000": Batch(depth=1000),
    "H=2044": Batch(depth=2044),
    "H=4096 V=128256": Batch(depth=4096, vocabulary=128_256),
    "H=7168 V=129280": Batch(depth=7168, vocabulary=129_280),
    "H=640 V=262144 softcap": Batch(depth=640, vocabulary=262_144, softcap=30.0),
    "V=50257": Batch(depth=768, vocabulary=50_257),
    "temperature": Batch(temperature=True),
    "bias, temperature": Batch(bias=True, temperature=True),
    "bias, temperature, softcap": _ALL,
    "float32, bias, temperature, softcap": replace(_ALL, dtype=torch.float32),
    "H=2044, bias, temperature, softcap": replace(_ALL, depth=2044),
}
"""What changes the machine code: dtypes, alignment, vocabulary edges, the way from a product to a logit."""
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo with everything": {
        "loss_type": "grpo",
        "delta": 5.0,
        "beta": 0.04,
        "use_bias_correction_kl": True,
        "entropy_coef": 0.01,
        "sampler_correction": "geometric_mask",
        "off_policy_mask_threshold": 1.0,
    },
    "gspo": {"loss_type": "gspo", "beta": 0.04, "sampler_correction": "token_truncate"},
    "cispo": {"loss_type": "cispo", "beta": 0.04, "kl_estimator": "k2"},
    "sapo": {"loss_type": "sapo", "beta": 0.04, "kl_estimator": "k1"},
    "dppo_tv": {"loss_type": "dppo_tv"},
    "dppo_kl": {"loss_type": "dppo_kl"},
}
"""Every surrogate, plain to all options."""


def shipped_cases(capability: int) -> dict[str, Callable[[], object]]:
    """Name of the case to the call that launches its kernels."""
    cases: dict[str, Callable[[], object]] = {}
    for name, batch in BATCHES.items():
        run = partial(step, batch, capability)
        cases |= {f"certified, {name}": run, f"exact, {name}": partial(run, exact=True)}
        if batch.softcap is None:
            cases[f"exact from what was kept, {name}"] = partial(run, exact=True, keep=True)
        if name in ("bfloat16", "bias, temperature, softcap"):
            cases |= {
                f"all statistics and their gradients, {name}": partial(run, everything=True),
                f"frozen head, {name}": partial(run, weight=False),
                f"exact, frozen head, {name}": partial(run, exact=True, weight=False),
                f"frozen body, {name}": partial(run, hidden=False),
            }
    plain = partial(step, Batch(), capability)
    cases["all statistics, kept"] = partial(plain, everything=True, keep=True)
    cases["into a float32 gradient"] = partial(plain, accumulate=True)
    return cases | {f"policy loss, {name}": partial(policy_loss, options) for name, options in LOSSES.items()}


# What the compiler made of it -----------------------------------------------------------------------------


_DOT = r"tt\.dot .*?tensor<(\d+)x\d+xb?f16"


@dataclass(frozen=True)
class Report:
    """One compiled kernel."""

    case: str  # of `shipped_cases`, the first that launches it
    kernel: str
    config: str  # constexprs, warps, stages
    capability: int
    registers: int  # per thread
    spills: int  # instructions
    shared: int  # bytes per program, static and dynamic
    ctas: int  # programs that a multiprocessor holds at a time
    dots: int  # tl.dot of half precision operands in the source, after specialisation, of 64 rows or more
    tensor_core: int  # tensor core instructions of the expected kind
    narrow: int = 0  # instructions that move 16 bits a thread to or from global memory
    step: int = 0  # instructions of a warp, where it was disassembled: see `machine_code.Loops`
    epilogue: int = 0
    instructions: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTS}

    def faults(self) -> list[str]:
        """What keeps this kernel from shipping; empty when nothing does."""
        found = []
        if self.spills:
            found.append(f"spills ({self.spills} instructions)")
        if self.shared > SHARED_MEMORY[self.capability]:
            found.append(f"shared memory {self.shared} > {SHARED_MEMORY[self.capability]}")
        if self.dots and not self.tensor_core:
            found.append(f"no {TENSOR_CORE[self.capability]} for a tl.dot")
        return found

    def regressions(self, record: Mapping[str, int]) -> list[str]:
        """What is worse than recorded, beyond what a patch release of the compiler may move."""
        found = []
        for name, new in self.counts.items():
            old = record[name]
            if new < old if name == "ctas" else new > old + max(4, old // 20):
                found.append(f"{name} {old:,} -> {new:,}")
        return found


@contextmanager
def compile_only(capability: int) -> Iterator[list[tuple[Any, Any, dict[str, Any]]]]:
    """Inside, `kernel[grid](...)` compiles and launches nothing. Yields what was compiled so far."""
    from triton.backends.compiler import GPUTarget
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

    target = GPUTarget("cuda", capability, 32)
    offline = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,  # Triton keeps what it compiled by device
        get_current_stream=lambda device=0: 0,
    )
    with mock.patch.object(JITFunction, "run", record), mock.patch.object(driver, "_active", offline):
        yield compiled


def reports(
    capability: int, cases: Mapping[str, Callable[[], object]], *, disassemble: bool = False
) -> list[Report]:
    """Compiles every case and reports each distinct kernel once."""
    seen: dict[str, Report] = {}
    for case, launch in cases.items():
        with compile_only(capability) as compiled:
            launch()
        for function, binary, options in compiled:
            if binary.hash not in seen:
                found = _inspect(case, function, binary, options, capability, disassemble)
                twins = sum(
                    each.case == case and each.kernel.startswith(found.kernel) for each in seen.values()
                )
                seen[binary.hash] = replace(found, kernel=f"{found.kernel} {twins + 1}") if twins else found
    return list(seen.values())


def _inspect(
    case: str, function: Any, binary: Any, options: dict[str, Any], capability: int, disassemble: bool
) -> Report:
    """Reads the code of one compiled kernel."""
    registers, spills, static, loops = read(binary.asm["cubin"], disassemble=disassemble)
    metadata, ptx = binary.metadata, binary.asm["ptx"]
    shared = max(metadata.shared, static)
    constants = {name: value for name, value in options.items() if name.isupper() and isinstance(value, int)}
    constants |= {"warps": metadata.num_warps, "stages": metadata.num_stages}
    return Report(
        case=case,
        kernel=function.fn.__name__,
        config=" ".join(f"{name}={int(value)}" for name, value in constants.items()),
        capability=capability,
        registers=registers,
        spills=spills,
        shared=shared,
        ctas=resident_programs(capability, metadata.num_warps, registers, shared),
        dots=sum(int(rows) >= 64 for rows in re.findall(_DOT, binary.asm["ttir"])),
        tensor_core=ptx.count(f"{TENSOR_CORE[capability]}."),
        narrow=len(re.findall(r"\b(?:ld|st)\.global[.a-z0-9:]*\.[bu]16\b", ptx)),
        **loops._asdict(),
    )


# The record -----------------------------------------------------------------------------------------------

Record = dict[tuple[str, str], dict[str, int]]  # by case and kernel


def table(rows: list[Report], verdicts: list[str]) -> str:
    heads = ["case", "kernel", "configuration", *COUNTS, "tensor core", "ships"]
    lines = [heads, ["---"] * len(heads)]
    for row, ships in zip(rows, verdicts, strict=True):
        tensor_core = f"{row.tensor_core} {TENSOR_CORE[row.capability]}" if row.dots else "no dot"
        counts = [f"{count:,}" for count in row.counts.values()]
        lines.append([row.case, f"`{row.kernel}`", row.config, *counts, tensor_core, ships])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(row: Report, record: Record | None) -> str:
    """`yes`, `new` where a record does not know the kernel, or what is wrong."""
    earlier = record and record.get((row.case, row.kernel))
    wrong = row.faults() + (row.regressions(earlier) if earlier else [])
    return "; ".join(wrong) or ("yes" if earlier or record is None else "new")


def record_path(capability: int) -> Path:
    """Of the Triton installed, by its minor version."""
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    return Path(__file__).with_name("results") / f"aot_sm{capability}_triton{version}.md"


def read_record(text: str) -> Record:
    """The first table of what `main` wrote."""
    lines = text.split("\n\n")[1].splitlines()
    heads, _, *rows = [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in lines]
    found = {}
    for row in rows:
        cells = dict(zip(heads, row, strict=True))
        found[row[0], row[1]] = {name: int(cells[name].replace(",", "")) for name in COUNTS}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capability", type=int, choices=sorted(SHARED_MEMORY), default=90)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    which.add_argument("--record", action="store_true", help="write what is found in the record's place")


def main(options: argparse.Namespace) -> int:
    import triton

    path = record_path(options.capability)
    record = read_record(path.read_text()) if path.exists() and not options.record else None
    shipped = shipped_cases(options.capability)
    cases = {name: run for name, run in shipped.items() if any(part in name for part in options.only)}
    rows = reports(options.capability, cases, disassemble=True)
    verdicts = [verdict(row, record) for row in rows]
    found = f"""Compiled for sm_{options.capability} by Triton {triton.__version__}; nothing was run.

{table(rows, verdicts)}

One forward and backward of the head, bfloat16, N = 16,384, {100 * dry_head.DENSITY:.1f} % of the pairs live.

{dry_head.table(options.capability)}
"""
    print(found)
    if options.record:
        path.write_text(found)
    elif record is None:
        print(f"There is no {path.name}: faults alone count.")
    return 0 if {*verdicts} <= {"yes", "new"} else 1
