"""`python -m benchmarks aot`: what the compiler makes of every kernel we ship, without a GPU.

Nothing is listed twice: each case runs the head or the policy loss on meta tensors of a real shape, while
Triton compiles for the named architecture and launches nothing. The kernels, tile sizes, warps, stages and
argument specialisations are therefore the shipped ones.

It fails on what keeps a kernel from shipping. One architecture alone is disassembled, too, and held to the
record of this minor version of Triton in `results/`, where there is one: nothing may grow by more than 5 %
and 4; --record writes it. Another Triton: `pip install --no-deps --target DIR triton==3.5.1`, and DIR first
in PYTHONPATH. Run it in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
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
from .dry_head import BatchSizes, meta, step
from .machine import environment
from .machine_code import read, read_amd, resident_programs
from .record import write_json

TENSOR_CORE = {
    "sm_80": "mma.sync", "sm_86": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma", "sm_120": "mma.sync", "gfx942": "v_mfma", "gfx950": "v_mfma",
}  # fmt: skip
"""PTX, or AMD's assembler, by which a half precision `tl.dot` reaches the matrix cores at their full rate."""
COUNTS = ("registers", "spills", "shared", "ctas", "step", "epilogue", "instructions")
"""What the record holds of a kernel."""


# What is launched -----------------------------------------------------------------------------------------


def policy_loss(options: dict[str, Any], tokens: int = 16_384, sequences: int = 64) -> None:
    """The policy loss with these fields of its configuration."""
    from grpo_fast.kernels.policy_facts import PolicyBatch
    from grpo_fast.kernels.policy_loss import policy_loss as launch

    from grpo_fast.head.fused_loss import loss_constants
    from grpo_fast.objective import GRPOLossConfig

    config = GRPOLossConfig(**options)
    row, ids, mask = (meta(tokens, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.bool))
    reference, sampler = (row if given else None for given in (config.needs_reference, config.needs_sampler))
    batch = PolicyBatch(row, row, ids, mask, row, reference, sampler, row, sequences)
    launch(batch, loss_constants(config, None))


_ALL = BatchSizes(bias=True, temperature=True, softcap=30.0)
BATCHES = {
    "bfloat16": BatchSizes(),
    "float16": BatchSizes(dtype=torch.float16),
    "float32": BatchSizes(dtype=torch.float32),
    "H=1000": BatchSizes(depth=1000),
    "H=2044": BatchSizes(depth=2044),
    "H=4096 V=128256": BatchSizes(depth=4096, vocabulary=128_256),
    "H=7168 V=129280": BatchSizes(depth=7168, vocabulary=129_280),
    "H=640 V=262144 softcap": BatchSizes(depth=640, vocabulary=262_144, softcap=30.0),
    "V=50257": BatchSizes(depth=768, vocabulary=50_257),
    "temperature": BatchSizes(temperature=True),
    "bias, temperature": BatchSizes(bias=True, temperature=True),
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


def shipped_cases(architecture: str) -> dict[str, Callable[[], object]]:
    """Name of the case to the call that launches its kernels."""
    cases: dict[str, Callable[[], object]] = {}
    for name, batch in BATCHES.items():
        run = partial(step, batch, architecture)
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
    plain = partial(step, BatchSizes(), architecture)
    cases["all statistics, kept"] = partial(plain, everything=True, keep=True)
    cases["into a float32 gradient"] = partial(plain, accumulate=True)
    return cases | {f"policy loss, {name}": partial(policy_loss, options) for name, options in LOSSES.items()}


# What the compiler made of it -----------------------------------------------------------------------------


_DOT = r"tt\.dot .*?tensor<(\d+)x\d+xb?f16"


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel."""

    case: str  # of `shipped_cases`, the first that launches it
    kernel: str
    config: str  # constexprs, warps, stages
    architecture: str
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
        if self.shared > SHARED_MEMORY[self.architecture]:
            found.append(f"shared memory {self.shared} > {SHARED_MEMORY[self.architecture]}")
        if self.dots and not self.tensor_core:
            found.append(f"no {TENSOR_CORE[self.architecture]} for a tl.dot")
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
def compile_only(architecture: str) -> Iterator[list[tuple[Any, Any, dict[str, Any]]]]:
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

    hip = architecture.startswith("gfx")
    target = GPUTarget("hip", architecture, 64) if hip else GPUTarget("cuda", int(architecture[3:]), 32)
    offline = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: architecture,  # Triton keeps what it compiled by device
        get_current_stream=lambda device=0: 0,
    )
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(driver, "_active", offline),
        mock.patch.object(torch.version, "hip", "of no version" if hip else None),
    ):
        yield compiled


def reports(
    architecture: str, cases: Mapping[str, Callable[[], object]], *, disassemble: bool = False
) -> list[CompiledKernel]:
    """Compiles every case and reports each distinct kernel once."""
    seen: dict[str, CompiledKernel] = {}
    for case, launch in cases.items():
        with compile_only(architecture) as compiled:
            launch()
        for function, binary, options in compiled:
            if binary.hash not in seen:
                found = _inspect(case, function, binary, options, architecture, disassemble)
                twins = sum(
                    each.case == case and each.kernel.startswith(found.kernel) for each in seen.values()
                )
                seen[binary.hash] = replace(found, kernel=f"{found.kernel} {twins + 1}") if twins else found
    return list(seen.values())


def _inspect(
    case: str, function: Any, binary: Any, options: dict[str, Any], architecture: str, disassemble: bool
) -> CompiledKernel:
    """Reads the code of one compiled kernel."""
    metadata, asm = binary.metadata, binary.asm
    if "cubin" in asm:
        text, (registers, spills, static, loops) = asm["ptx"], read(asm["cubin"], disassemble=disassemble)
    else:
        text, (registers, spills, static, loops) = asm["amdgcn"], read_amd(asm["amdgcn"])
    shared = max(metadata.shared, static)
    constants = {name: value for name, value in options.items() if name.isupper() and isinstance(value, int)}
    constants |= {"warps": metadata.num_warps, "stages": metadata.num_stages}
    return CompiledKernel(
        case=case,
        kernel=function.fn.__name__,
        config=" ".join(f"{name}={int(value)}" for name, value in constants.items()),
        architecture=architecture,
        registers=registers,
        spills=spills,
        shared=shared,
        ctas=resident_programs(architecture, metadata.num_warps, registers, shared),
        dots=sum(int(rows) >= 64 for rows in re.findall(_DOT, asm["ttir"])),
        tensor_core=text.count(TENSOR_CORE[architecture]),
        narrow=len(re.findall(r"\b(?:ld|st)\.global[.a-z0-9:]*\.[bu]16\b", text)),
        **loops._asdict(),
    )


# The record -----------------------------------------------------------------------------------------------

Counts = dict[tuple[str, str], dict[str, int]]  # by case and kernel


def table(rows: list[CompiledKernel], verdicts: list[str]) -> str:
    heads = ["case", "kernel", "configuration", *COUNTS, "tensor core", "ships"]
    lines = [heads, ["---"] * len(heads)]
    for row, ships in zip(rows, verdicts, strict=True):
        tensor_core = f"{row.tensor_core} {TENSOR_CORE[row.architecture]}" if row.dots else "no dot"
        counts = [f"{count:,}" for count in row.counts.values()]
        lines.append([row.case, f"`{row.kernel}`", row.config, *counts, tensor_core, ships])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(row: CompiledKernel, record: Counts | None) -> str:
    """`yes`, `new` where a record does not know the kernel, or what is wrong."""
    earlier = record and record.get((row.case, row.kernel))
    wrong = row.faults() + (row.regressions(earlier) if earlier else [])
    return "; ".join(wrong) or ("yes" if earlier or record is None else "new")


def record_path(architecture: str) -> Path:
    """Of the Triton installed, by its minor version."""
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    return Path(__file__).with_name("results") / f"aot_{architecture}_triton{version}.md"


def read_record(text: str) -> Counts:
    """The first table of what `main` wrote."""
    lines = text.split("\n\n")[1].splitlines()
    heads, _, *rows = [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in lines]
    found = {}
    for row in rows:
        cells = dict(zip(heads, row, strict=True))
        found[row[0], row[1]] = {name: int(cells[name].replace(",", "")) for name in COUNTS}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--architecture", nargs="+", choices=SHARED_MEMORY, default=[*SHARED_MEMORY], metavar="NAME",
        help=f"of {', '.join(SHARED_MEMORY)} (all); the whole table is printed of one",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument(
        "--record", action="store_true", help="of one architecture: write what is found in the record's place"
    )
    parser.add_argument("--json", type=Path, help="a summary, which keeps other versions of Triton")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a record of a part of the cases, or of more than is disassembled; no case is named so.
    """
    if (options.record or options.json) and options.only != [""]:
        raise ValueError("--record and --json take all cases: leave out --only")
    if options.record and len(options.architecture) > 1:
        raise ValueError("--record takes one --architecture, such as sm_90: only one is disassembled")
    if not any(part in name for part in options.only for name in shipped_cases("sm_90")):
        raise ValueError(
            f"--only {' '.join(options.only)} is in no case's name; there are {', '.join(BATCHES)}"
        )
    summaries = []
    for architecture in options.architecture:
        shipped = shipped_cases(architecture)
        cases = {name: run for name, run in shipped.items() if any(part in name for part in options.only)}
        rows = reports(architecture, cases, disassemble=len(options.architecture) == 1)
        summaries.append(check(architecture, rows, options))
        if options.json is not None:
            save(options.json, summaries)
    return int(any(summary["faulty"] for summary in summaries))


def check(architecture: str, rows: list[CompiledKernel], options: argparse.Namespace) -> dict[str, Any]:
    """Prints and writes what was found of an architecture; returns its summary."""
    import triton

    path, alone = record_path(architecture), len(options.architecture) == 1
    compared = alone and path.exists() and not options.record  # the others are not disassembled
    record = read_record(path.read_text()) if compared else None
    verdicts = [verdict(row, record) for row in rows]
    faulty = [pair for pair in zip(rows, verdicts, strict=True) if pair[1] not in ("yes", "new")]
    summary = {
        "architecture": architecture,
        "triton": triton.__version__,
        "kernels": len(rows),
        "faulty": len(faulty),
        "spills": sum(row.spills for row in rows),
        "registers": max(row.registers for row in rows),
        "shared": max(row.shared for row in rows),
    }
    found = f"""Compiled for {architecture} by Triton {triton.__version__}; nothing was run.

{table(rows, verdicts)}

One forward and backward of the head, bfloat16, N = 16,384, {100 * dry_head.DENSITY:.1f} % of the pairs kept.

{dry_head.table(architecture)}
"""
    if options.record:
        path.write_text(found)
    if alone:
        print(found)
        if record is None and not options.record:
            print(f"There is no {path.name}: faults alone count.")
    else:
        print(", ".join(f"{name} {value}" for name, value in summary.items()), flush=True)
        for row, wrong in faulty:
            print(f"  {row.case}: {row.kernel} ({row.config}): {wrong}", flush=True)
    return summary


def save(path: Path, summaries: list[dict[str, Any]]) -> None:
    """Replaces what the file says of the same Triton and architectures."""
    known = json.loads(path.read_text(encoding="utf-8"))["aot"] if path.exists() else []
    of_each = {(row["triton"], row["architecture"]): row for row in (*known, *summaries)}
    write_json(path, {"environment": environment(torch.device("cpu")), "aot": [*of_each.values()]})
