"""`python -m benchmarks.profile_head`: the kernels that one step of the head spends its time in.

Runs `linear_logprob` forward and backward on rows with a real model's live tiles under torch's profiler. The
time of every kernel is set beside that of one product X Wᵀ by the vendor's library in the same run, and what
the GPU idles between kernels is counted too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .live_tiles import HISTOGRAM, load_histogram
from .machine import multiplication
from .measure import seconds_of
from .peers.ours import prepare
from .problem import FORWARD_BACKWARD, Setting
from .record import write_json
from .rows import make_problem
from .tables import label

REPEATS, SAMPLES = 5, 9
TOKENS = 16_384
SHAPES = (  # H, V, trainable, tolerance
    (2048, 151_936, True, None),
    (2048, 151_936, False, None),
    (4096, 128_256, True, None),
    (896, 151_936, True, None),
    (2048, 151_936, True, 0.0),
)


def measure(hidden: int, vocabulary: int, trainable: bool, tolerance: float | None) -> dict[str, Any]:
    """One shape's wall time, the product's, and milliseconds and launches a step of each kernel."""
    device = torch.device("cuda")
    setting = Setting("histogram", TOKENS, hidden, vocabulary, FORWARD_BACKWARD, trainable, "bfloat16")
    problem = make_problem(setting, device, 0, load_histogram(HISTOGRAM))
    step = prepare(problem, tolerance)

    def run() -> None:
        step()
        problem.clear()

    run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    kernels = [
        {"kernel": e.key, "ms": e.self_device_time_total / 1e3 / REPEATS, "launches": e.count / REPEATS}
        for e in profiler.key_averages()
        if e.self_device_time_total and e.device_type == torch.autograd.DeviceType.CUDA
    ]
    wall = seconds_of(run, device, SAMPLES).median
    multiply = multiplication([(problem.hidden.detach(), problem.weight.detach())])
    product = seconds_of(lambda: multiply(None), device, SAMPLES).median
    return {
        "setting": label(vars(setting)),
        "tolerance": tolerance,
        "step_ms": wall,
        "product_ms": product,
        "multiple": wall / product,
        "idle_ms": wall - sum(kernel["ms"] for kernel in kernels),
        "kernels": sorted(kernels, key=lambda kernel: -kernel["ms"]),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_head", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("profile_head: torch sees no CUDA device", file=sys.stderr)
        return 2
    found = []
    for shape in SHAPES:
        one = measure(*shape)
        found.append(one)
        product = one["product_ms"]
        print(f"{one['setting']}, tolerance {one['tolerance']}: {one['step_ms']:.2f} ms, "
              f"{one['multiple']:.3f} products of {product:.2f} ms")  # fmt: skip
        idle = {"kernel": "no kernel runs", "ms": one["idle_ms"], "launches": 0}
        for kernel in [*one["kernels"][:24], idle]:
            ms = kernel["ms"]
            print(f"  {ms:8.3f} ms {ms / product:7.3f} x{kernel['launches']:4.0f}  {kernel['kernel'][:80]}")
        if options.json is not None:
            write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
