"""Compile every kernel ahead of time, without a GPU: `python tests/kernels/aot.py [ARCHITECTURE ...]`.

Each case runs the head or the policy loss on meta tensors of a real shape. Triton compiles for the named
architecture and launches nothing, so kernels, tile sizes, warps, stages and specializations are those that
ship. The exit code is 1 where a kernel has a fault. Run it in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from grpo_fast.kernels import TILE
from torch import Tensor

from grpo_fast.head.call import HeadCall, RowGradients, Wanted
from grpo_fast.head.fused_loss import loss_constants
from grpo_fast.head.operator import scaled_jacobian
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Device, HeadPlan, Workload, plan_head
from grpo_fast.head.tuning import SHARED_MEMORY
from grpo_fast.objective import GRPOLossConfig

DENSITY = 0.0078  # pairs kept by default on rows of Qwen2.5-Coder-1.5B
MATRIX_CORES = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma", "gfx950": "v_mfma"}
WIDE = {"forward_kernel", "logit_gradient_kernel", "hidden_kernel", "target_rows_kernel"}
"""Kernels that read or write rows of logits."""


# One forward and backward of the head on meta tensors -----------------------------------------------------


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of one head. Rows of a `depth` that is not a multiple of 8 fit no tensor descriptor."""

    dtype: torch.dtype = torch.bfloat16
    rows: int = 16_384
    depth: int = 2048
    vocabulary: int = 151_936
    bias: bool = False
    temperature: bool = False
    softcap: float | None = None

    @property
    def problem(self) -> HeadCall:
        return HeadCall(
            meta(self.rows, self.depth, dtype=self.dtype),
            meta(self.vocabulary, self.depth, dtype=self.dtype),
            meta(self.rows, dtype=torch.int64),
            bias=meta(self.vocabulary, dtype=self.dtype) if self.bias else None,
            inv_temperature=meta(self.rows) if self.temperature else None,
            softcap=self.softcap,
        )

    def plan(self, architecture: str, **options: Any) -> HeadPlan:
        """Return the head's plan on that architecture; `options` are fields of `Workload`."""
        gfx = architecture if architecture.startswith("gfx") else ""
        capability = (0, 0) if gfx else divmod(int(architecture[3:]), 10)
        device = Device("cuda", capability, SHARED_MEMORY[architecture], has_triton=True, gfx=gfx)
        sizes = {"softcap": self.softcap is not None, "hidden_size": self.depth}
        aligned = self.depth * self.dtype.itemsize % 16 == 0
        work = Workload(self.rows, self.vocabulary, self.dtype, aligned=aligned, **sizes, **options)
        return plan_head(device, work)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step(
    batch: BatchSizes,
    architecture: str,
    *,
    exact: bool = False,
    everything: bool = False,
    keep: bool = False,
    accumulate: bool = False,
    hidden: bool = True,
    weight: bool = True,
    ask: Callable[[Any], Any] = lambda answer: answer,
) -> list[Tensor]:
    """Run a forward and a backward with a gradient in every row.

    Args:
        batch: the sizes of the head.
        architecture: a key of `SHARED_MEMORY`.
        exact: tolerance 0.
        everything: all statistics, with gradients of the entropy and the mean logit.
        keep: the forward keeps what the backward reads.
        accumulate: add the weight's gradient to a float32 buffer.
        hidden: whether the hidden states take a gradient.
        weight: whether the weight and its bias take a gradient.
        ask: called with each value that the host reads.

    Returns:
        The inputs, statistics and gradients of the head.
    """
    from grpo_fast.head import accelerated

    problem, row = batch.problem, meta(batch.rows)
    upstream = RowGradients(*(4 if everything else 1) * [row])
    wanted = Wanted(
        hidden, weight, batch.bias and weight, meta(*problem.weight.shape) if accumulate else None
    )
    pairs = round(DENSITY * batch.rows * -(-batch.vocabulary // TILE))
    options: dict[str, Any] = {"tolerance": 0.0 if exact else None, "trainable": weight}
    jacobian = not (everything or weight)
    statistics_of = dict.fromkeys(("entropy", "mean_logit", "max_logit", "log_sum_sq"), everything)
    plan = batch.plan(architecture, extra_statistics=4 * everything, keep=keep, jacobian=jacobian, **options)
    with (
        mock.patch.object(Tensor, "is_cuda", True),  # products take half precision
        mock.patch.object(Tensor, "nonzero", lambda rows: ask(meta(len(rows), 1, dtype=torch.int64))),
        mock.patch.object(accelerated, "_capturing", lambda _: False),
        mock.patch.object(accelerated, "_read_later", lambda _: lambda: ask(pairs)),
    ):
        statistics, state = accelerated.forward(problem._replace(**statistics_of), plan)
        if plan.jacobian:
            gradients = scaled_jacobian(problem, upstream, state.jacobian)
        else:
            plan = batch.plan(architecture, entropy_gradient=everything, mean_gradient=everything, **options)
            pending = Certificate.pending(problem.hidden.device)
            gradients = accelerated.backward(problem, statistics, upstream, wanted, state, pending, plan)
    return [each for each in (*problem, row, *statistics, *gradients) if isinstance(each, Tensor)]


def policy_loss(options: dict[str, Any], tokens: int = 16_384, sequences: int = 64) -> None:
    """Launch the policy loss with these fields of its configuration."""
    from grpo_fast.kernels.policy_facts import PolicyBatch
    from grpo_fast.kernels.policy_loss import policy_loss as launch

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
    "grpo with everything": {
        **{"loss_type": "grpo", "delta": 5.0, "beta": 0.04, "use_bias_correction_kl": True},
        **{"entropy_coef": 0.01, "sampler_correction": "geometric_mask", "off_policy_mask_threshold": 1.0},
    },
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "gspo", "beta": 0.04, "sampler_correction": "token_truncate"},
    "cispo": {"loss_type": "cispo", "beta": 0.04, "kl_estimator": "k2"},
    "sapo": {"loss_type": "sapo", "beta": 0.04, "kl_estimator": "k1"},
    "dppo_tv": {"loss_type": "dppo_tv"},
    "dppo_kl": {"loss_type": "dppo_kl"},
}
"""Every surrogate, from the plain one to all options."""


def cases_of(architecture: str) -> dict[str, Callable[[], object]]:
    """Return the call that launches the kernels of each case."""
    cases: dict[str, Callable[[], object]] = {}
    for name, batch in BATCHES.items():
        run = partial(step, batch, architecture)
        cases |= {f"sparse, {name}": run, f"exact, {name}": partial(run, exact=True)}
        if batch.softcap is None:
            cases[f"kept, {name}"] = partial(run, exact=True, keep=True)
        if name in ("bfloat16", "bias, temperature, softcap"):
            cases |= {
                f"all statistics, {name}": partial(run, everything=True),
                f"frozen head, {name}": partial(run, weight=False),
                f"exact, frozen head, {name}": partial(run, exact=True, weight=False),
                f"frozen body, {name}": partial(run, hidden=False),
            }
    plain = partial(step, BatchSizes(), architecture)
    cases["all statistics, kept"] = partial(plain, everything=True, keep=True)
    cases["into a float32 gradient"] = partial(plain, accumulate=True)
    return cases | {f"policy loss, {name}": partial(policy_loss, options) for name, options in LOSSES.items()}


# The compiler ---------------------------------------------------------------------------------------------


@contextmanager
def compile_only(architecture: str) -> Iterator[list[tuple[str, Any]]]:
    """Compile each launch instead of running it; yield the name and binary of each kernel so far."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))
        return compiled[-1][1]

    hip = architecture.startswith("gfx")
    target = GPUTarget("hip", architecture, 64) if hip else GPUTarget("cuda", int(architecture[3:]), 32)
    offline = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: architecture,  # Triton caches by device
        get_current_stream=lambda device=0: 0,
    )
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(driver, "_active", offline),
        mock.patch.object(torch.version, "hip", "of no version" if hip else None),
    ):
        yield compiled


def faults(architecture: str, name: str, binary: Any, *, vectors: bool = False) -> list[str]:
    """Return what keeps a compiled kernel from shipping: spills, shared memory, unused matrix cores.

    Args:
        architecture: that it was compiled for.
        name: of the kernel.
        binary: Triton's compiled kernel.
        vectors: rows of logits must move in whole vectors, not two bytes per thread.
    """
    found, text = [], binary.asm.get("ptx") or binary.asm["amdgcn"]
    if spills := spilled(binary):
        found.append(f"{spills} instructions spill")
    if binary.metadata.shared > SHARED_MEMORY[architecture]:
        found.append(f"shared memory {binary.metadata.shared} > {SHARED_MEMORY[architecture]}")
    dots = re.findall(r"tt\.dot .*?tensor<(\d+)x\d+xb?f16", binary.asm["ttir"])
    instruction = MATRIX_CORES.get(architecture, "mma.sync")
    if any(int(rows) >= 64 for rows in dots) and instruction not in text:
        found.append(f"no {instruction} for a tl.dot")
    if vectors and name in WIDE and re.search(r"\b(?:ld|st)\.global[.a-z0-9:]*\.[bu]16\b", text):
        found.append("moves two bytes per thread")
    return found


def spilled(binary: Any) -> int:
    """Count the instructions that spill registers; a stack alone need not be used."""
    if "amdgcn" in binary.asm:
        spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", binary.asm["amdgcn"])
        stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", binary.asm["amdgcn"])
        return int(spills[1]) if int(stack[1]) else 0
    from triton import knobs
    from triton.tools.disasm import get_sass

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
    if "STACK:0" in usage:
        return 0
    return len(re.findall(r"\b(?:STL|LDL)\b", get_sass(binary.asm["cubin"])))


def compile_cases(architecture: str, cases: Sequence[str]) -> dict[str, list[str]]:
    """Return the faults of each distinct kernel of these cases, by case, name and metadata."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for case in cases:
        with compile_only(architecture) as compiled:
            cases_of(architecture)[case]()
        for name, binary in compiled:
            if binary.hash not in seen:
                seen.add(binary.hash)
                of_kernel = f"{architecture}, {case}: {name} #{len(seen)}"
                found[of_kernel] = faults(architecture, name, binary, vectors=case.endswith(", bfloat16"))
    return found


def variants(architecture: str, launches: Sequence[Callable[[], object]]) -> dict[str, int]:
    """Count the variants of each kernel that the launches need, by Triton's cache keys; compile none."""
    from triton.runtime.jit import JITFunction

    def remember(self: Any, key: str, signature: Any, device: str, *_: Any) -> Any:
        self.device_caches[device][0][key] = SimpleNamespace(hash=key)
        return self.device_caches[device][0][key]

    with mock.patch.object(JITFunction, "_do_compile", remember), compile_only(architecture) as compiled:
        for launch in launches:
            launch()
    return Counter(name for name, _ in {(name, stub.hash) for name, stub in compiled})


def main(arguments: Sequence[str]) -> int:
    wrong = 0
    for architecture in arguments or SHARED_MEMORY:
        found = compile_cases(architecture, [*cases_of(architecture)])
        faulty = {kernel: of for kernel, of in found.items() if of}
        wrong += len(faulty)
        print(f"{architecture}: {len(found)} kernels, {len(faulty)} with a fault", flush=True)
        for kernel, of in faulty.items():
            print(f"  {kernel}: {'; '.join(of)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
