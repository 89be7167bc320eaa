"""Compile every kernel ahead of time, without a GPU: `python tests/kernels/aot.py [ARCHITECTURE ...]`.

Each case runs the head or the policy loss on meta tensors of a real shape. Triton compiles the shipped
kernels for the architecture and launches nothing. The exit code is 1 if a kernel has a fault. Run it in a
separate process, without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from grpo_fast.kernels import TILE
from torch import Tensor

from grpo_fast.head import operator
from grpo_fast.head.autograd import scaled_jacobian
from grpo_fast.head.call import DivergenceGradients, HeadCall, KLCall, RowGradients, Wanted
from grpo_fast.head.fused_loss import loss_constants
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Device
from grpo_fast.head.tuning import SHARED_MEMORY
from grpo_fast.objective import GRPOLossConfig
from grpo_fast.objective.catalog import CATALOG

DENSITY = 0.0078  # pairs kept by default on rows of Qwen2.5-Coder-1.5B
MATRIX_CORES = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma", "gfx950": "v_mfma"}
WIDE = {"forward_kernel", "logit_gradient_kernel", "target_rows_kernel"}
"""Kernels that read or write rows of logits."""
DEEP = ("H=12288", "H=20480")
STATISTICS = ("entropy", "mean_logit", "max_logit", "log_sum_sq")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def head(
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 16_384,
    depth: int = 2048,
    vocabulary: int = 151_936,
    bias: bool = False,
    temperature: bool = False,
    softcap: float | None = None,
) -> HeadCall:
    """Return a head on meta tensors."""
    hidden, weight = meta(rows, depth, dtype=dtype), meta(vocabulary, depth, dtype=dtype)
    of_vocabulary = meta(vocabulary, dtype=dtype) if bias else None
    inv_temperature = meta(rows) if temperature else None
    call = HeadCall(hidden, weight, meta(rows, dtype=torch.int64), of_vocabulary, inv_temperature)
    return call._replace(softcap=softcap)


def step(
    call: HeadCall,
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
    """Run a forward and a backward; return inputs, statistics and gradients.

    Args:
        exact: tolerance 0.
        everything: all statistics, and gradients of the entropy and the mean logit.
        keep: the forward keeps exponentials.
        accumulate: add the weight's gradient to a float32 buffer.
        hidden: it takes a gradient.
        weight: it takes a gradient, with its bias.
        ask: called with each value that the host reads.
    """
    from grpo_fast.head import accelerated

    row = meta(len(call.targets))
    upstream = RowGradients(*(4 if everything else 1) * [row])
    into = meta(*call.weight.shape) if accumulate else None
    wanted = Wanted(hidden, weight, weight and call.bias is not None, into)
    call = call._replace(tolerance=0.0 if exact else None, keep=keep, jacobian=not (everything or weight))
    call = call._replace(**dict.fromkeys(STATISTICS, everything))
    with on_device(architecture, call, ask):
        plan = operator._plan_forward(call)
        statistics, saved = accelerated.forward(call, plan)
        if plan.jacobian:
            gradients = scaled_jacobian(call, row, saved.jacobian)
        else:
            plan = operator.plan_of(call, entropy_gradient=everything, mean_gradient=everything)
            pending = Certificate.pending(row.device)
            gradients = accelerated.backward(call, statistics, upstream, wanted, saved, pending, plan)
    return [each for each in (*call, row, *statistics, *gradients) if isinstance(each, Tensor)]


@contextmanager
def on_device(
    architecture: str, call: HeadCall, ask: Callable[[Any], Any] = lambda answer: answer
) -> Iterator[None]:
    """Let meta tensors take a GPU's path; `ask` is called with each value that the host reads."""
    from grpo_fast.head import accelerated

    gfx = architecture if architecture.startswith("gfx") else ""
    capability = (0, 0) if gfx else divmod(int(architecture[3:]), 10)
    device = Device("cuda", capability, SHARED_MEMORY[architecture], has_triton=True, gfx=gfx)
    pairs = round(DENSITY * len(call.targets) * -(-call.vocabulary // TILE))
    with (
        mock.patch.object(operator, "device_facts", lambda kind, index: device),
        mock.patch.object(Tensor, "is_cuda", True),  # products take half precision
        mock.patch.object(Tensor, "nonzero", lambda rows: ask(meta(len(rows), 1, dtype=torch.int64))),
        mock.patch.object(accelerated, "_capturing", lambda _: False),
        mock.patch.object(accelerated, "_read_later", lambda _: lambda: ask(pairs)),
    ):
        yield


def divergence_step(
    call: HeadCall, architecture: str, direction: str, *, one_weight: bool = False, exact: bool = False
) -> None:
    """Run `linear_kl`'s kernels; the reference has half the hidden size, or the same weight."""
    from grpo_fast.head import accelerated_divergence

    hidden, vocabulary = call.hidden, call.vocabulary
    reference = call._replace(inv_temperature=None)
    if not one_weight:
        depth = hidden.shape[1] // 2
        operands = (meta(size, depth, dtype=hidden.dtype) for size in (len(hidden), vocabulary))
        reference = reference._replace(**dict(zip(("hidden", "weight"), operands, strict=True)))
    row = meta(len(hidden))
    pair = KLCall(call._replace(tolerance=0.0 if exact else None), reference, direction=direction)
    wanted = Wanted(True, True, call.bias is not None)
    with on_device(architecture, call):
        plan = operator.plan_of(pair.student)
        rows, saved = accelerated_divergence.forward(pair, plan)
        pending = Certificate.pending(row.device)
        gradients = DivergenceGradients(row)
        accelerated_divergence.backward(pair, rows, gradients, wanted, saved, pending, plan)


def policy_loss(options: dict[str, Any], tokens: int = 16_384, sequences: int = 64) -> None:
    """Launch the policy loss with these fields of its configuration."""
    from grpo_fast.kernels.policy_facts import PolicyBatch
    from grpo_fast.kernels.policy_loss import policy_loss as launch

    config = GRPOLossConfig(max_completion_length=512, **options)
    row, ids, mask = (meta(tokens, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.bool))
    batch = PolicyBatch(row, row, ids, mask, row, row, row, row, sequences)
    launch(batch, loss_constants(config, None))


_ALL = {"bias": True, "temperature": True, "softcap": 30.0}
HEADS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "H=1000": {"depth": 1000},
    "H=2044": {"depth": 2044},
    "H=7168 V=129280": {"depth": 7168, "vocabulary": 129_280},
    "H=640 V=262144 softcap": {"depth": 640, "vocabulary": 262_144, "softcap": 30.0},
    "H=12288": {"depth": 12_288},
    "H=20480": {"depth": 20_480},
    "float32, H=20480": {"depth": 20_480, "dtype": torch.float32},
    "V=50257": {"depth": 768, "vocabulary": 50_257},
    "bias, temperature": {"bias": True, "temperature": True},
    "bias, temperature, softcap": _ALL,
    "float32, bias, temperature, softcap": _ALL | {"dtype": torch.float32},
    "H=2044, bias, temperature, softcap": _ALL | {"depth": 2044},
}
"""Differences in the machine code: dtypes, alignment, vocabulary edges, logit transforms."""
LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name, facts in CATALOG.items() if facts.fused},
    "grpo with everything": {
        **{"loss_type": "grpo", "delta": 5.0, "beta": 0.04, "use_bias_correction_kl": True},
        **{"entropy_coef": 0.01, "sampler_correction": "geometric_mask", "off_policy_mask_threshold": 1.0},
    },
}


def cases_of(architecture: str) -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}
    for name, sizes in HEADS.items():
        run = partial(step, head(**sizes), architecture)
        cases |= {f"sparse, {name}": run, f"exact, {name}": partial(run, exact=True)}
        if "softcap" not in sizes:
            cases[f"kept, {name}"] = partial(run, exact=True, keep=True)
    for name in ("bfloat16", "bias, temperature, softcap"):
        run = partial(step, head(**HEADS[name]), architecture)
        cases |= {
            f"all statistics, {name}": partial(run, everything=True),
            f"all statistics, kept, {name}": partial(run, everything=True, keep=True),
            f"frozen head, {name}": partial(run, weight=False),
            f"exact, frozen head, {name}": partial(run, exact=True, weight=False),
            f"frozen body, {name}": partial(run, hidden=False),
            f"into a float32 gradient, {name}": partial(run, accumulate=True),
        }
    for name in ("bfloat16", "float32", "bias, temperature, softcap"):
        for direction in ("reverse", "forward", "jsd"):
            pair = partial(divergence_step, head(**HEADS[name]), architecture, direction)
            cases |= {
                f"{direction} KL, {name}": pair,
                f"{direction} KL of one weight, {name}": partial(pair, one_weight=True),
                f"exact {direction} KL, {name}": partial(pair, exact=True),
            }
    return cases | {f"policy loss, {name}": partial(policy_loss, options) for name, options in LOSSES.items()}


@contextmanager
def offline(architecture: str) -> Iterator[None]:
    """Let Triton compile for an architecture without its device."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    hip = architecture.startswith("gfx")
    target = GPUTarget("hip", architecture, 64) if hip else GPUTarget("cuda", int(architecture[3:]), 32)
    stub = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: architecture,  # Triton caches by device
        get_current_stream=lambda device=0: 0,
    )
    version = "of no version" if hip else None
    with mock.patch.object(driver, "_active", stub), mock.patch.object(torch.version, "hip", version):
        yield


@contextmanager
def compile_only(architecture: str) -> Iterator[list[tuple[str, Any]]]:
    """Compile each launch instead of running it; yield the name and binary of each kernel so far."""
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))
        return compiled[-1][1]

    with offline(architecture), mock.patch.object(JITFunction, "run", record):
        yield compiled


def faults(architecture: str, case: str, name: str, binary: Any) -> list[str]:
    """Return a compiled kernel's faults; spills of dX above 8,192 columns are only printed."""
    found, text = [], binary.asm.get("ptx") or binary.asm["amdgcn"]
    if spills := spilled(binary):
        found.append(f"{spills} instructions spill")
    if name == "_hidden_gradient" and case.endswith(DEEP) and found:
        print(f"{architecture}, {case}: {name}: {found.pop()}", file=sys.stderr)
    if binary.metadata.shared > SHARED_MEMORY[architecture]:
        found.append(f"shared memory {binary.metadata.shared} > {SHARED_MEMORY[architecture]}")
    dots = re.findall(r"tt\.dot .*?tensor<(\d+)x\d+xb?f16", binary.asm["ttir"])
    instruction = MATRIX_CORES.get(architecture, "mma.sync")
    if any(int(rows) >= 64 for rows in dots) and instruction not in text:
        found.append(f"no {instruction} for a tl.dot")
    of_logits = case.endswith(", bfloat16") and name in WIDE
    if of_logits and re.search(r"\b(?:ld|st)\.global[.a-z0-9:]*\.[bu]16\b", text):
        found.append("moves two bytes per thread")
    return found


def spilled(binary: Any) -> int:
    """Count the instructions that spill registers; a stack may be unused."""
    if "amdgcn" in binary.asm:
        spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", binary.asm["amdgcn"])
        stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", binary.asm["amdgcn"])
        return int(spills[1]) if int(stack[1]) else 0
    from triton.tools.disasm import get_sass

    if usage(binary)["STACK"] == 0:  # disassembling takes many times as long
        return 0
    return len(re.findall(r"\b(?:STL|LDL)\b", get_sass(binary.asm["cubin"])))


def usage(binary: Any) -> dict[str, int]:
    """Return an NVIDIA kernel's resources by cuobjdump's names: REG, STACK, SHARED, and others."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
    return {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", text)}


def compile_cases(architecture: str, cases: Sequence[str]) -> dict[str, list[str]]:
    """Return the faults of each distinct kernel of these cases, by case and name."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for case in cases:
        with compile_only(architecture) as compiled:
            cases_of(architecture)[case]()
        for name, binary in compiled:
            if binary.hash not in seen:
                seen.add(binary.hash)
                of_kernel = f"{architecture}, {case}: {name} #{len(seen)}"
                found[of_kernel] = faults(architecture, case, name, binary)
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


def main(architectures: Sequence[str]) -> int:
    wrong = 0
    for architecture in architectures or SHARED_MEMORY:
        found = compile_cases(architecture, [*cases_of(architecture)])
        faulty = {kernel: of for kernel, of in found.items() if of}
        wrong += len(faulty)
        print(f"{architecture}: {len(found)} kernels, {len(faulty)} with a fault", flush=True)
        for kernel, of in faulty.items():
            print(f"  {kernel}: {'; '.join(of)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
