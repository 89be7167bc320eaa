"""Each kernel of the head in one forward and backward, under torch's profiler.

The time is measured without the profiler. Its phases are kernels, on a CPU torch's operations, and `idle`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import profiler

from .conftest import DTYPE, ON_GPU, TRAINABLE
from .measure import synchronize
from .peers import peer_named
from .problem import FORWARD_BACKWARD, LOGPROB, PRODUCT, call

AXES = {
    "shape": ("16384x2048x151936", "16384x4096x151936") if ON_GPU else ("256x256x8192",),
    "rows": ["histogram"],
    "loss": [LOGPROB],
    "mode": [FORWARD_BACKWARD],
    "weight": [TRAINABLE],
    "dtype": [DTYPE],
    "peer": ("ours", "ours, tolerance 0"),
}
STEPS = 5


def test_kernels(peer, problem, vendor, in_turns, device, benchmark):
    run = partial(call, peer_named(peer).prepare(problem), problem)
    in_turns(run, vendor, PRODUCT)
    activity, kind = profiler.ProfilerActivity, torch.autograd.DeviceType
    on_gpu = device.type == "cuda"
    with profiler.profile(activities=[activity.CPU, *[activity.CUDA] * on_gpu]) as profiled:
        for _ in range(STEPS):
            run()
        synchronize(device)
    events = [e for e in profiled.key_averages() if e.device_type == (kind.CUDA if on_gpu else kind.CPU)]
    spent = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6 / STEPS for e in events]
    phases = {f"{e.key[:70]}, {e.count / STEPS:g} launches": s for e, s in zip(events, spent, strict=True)}
    idle = max(0.0, benchmark.stats.stats.median - sum(spent)) if benchmark.stats else 0.0
    benchmark.extra_info["phases"] = phases | {"idle": idle}
