"""`python -m benchmarks profile`: the kernels that one step of the head spends its time in.

Forward and backward on rows with a real model's live tiles, under torch's profiler, beside the same step and
one product X Wᵀ by the vendor's library, timed in the same run without it. What the device idles between
kernels is counted too. On a CPU the kernels are torch's operations.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import profiler

from .contest import Entrant, Found
from .goals import EXACT
from .head import HeadContests
from .live_tiles import HISTOGRAM, load_histogram
from .measure import seconds_of, synchronize
from .peers import Peer
from .peers.ours import PEERS
from .problem import FORWARD_BACKWARD, Setting
from .rows import Source, make_problem
from .session import add_common_arguments, check_common, run_session
from .tables import OURS

REPEATS, MOST = 5, 24  # steps under the profiler, kernels shown
SHAPES = {  # N, H, V, whether the head is trained, and the implementation
    "cuda": (
        (16_384, 2048, 151_936, True, OURS),
        (16_384, 2048, 151_936, False, OURS),
        (16_384, 4096, 128_256, True, OURS),
        (16_384, 896, 151_936, True, OURS),
        (16_384, 2048, 151_936, True, EXACT),
    ),
    "cpu": ((64, 64, 2048, True, OURS), (64, 64, 2048, True, EXACT)),
}


def kernels_of(peer: Peer, setting: Setting, source: Source, device: torch.device, seed: int) -> Found:
    """As phases the seconds of each kernel in a step; how many run, and milliseconds in which none does."""
    problem = make_problem(setting, device, seed, source)
    step = peer.prepare(problem)

    def run() -> None:
        step()
        problem.clear()

    run()
    activity, kind = profiler.ProfilerActivity, torch.autograd.DeviceType
    on_gpu = device.type == "cuda"
    with profiler.profile(activities=[activity.CPU, *[activity.CUDA] * on_gpu]) as profiled:
        for _ in range(REPEATS):
            run()
        synchronize(device)
    events = [e for e in profiled.key_averages() if e.device_type == (kind.CUDA if on_gpu else kind.CPU)]
    spent = {e.key[:80]: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events}
    kernels = {name: micro / 1e6 / REPEATS for name, micro in spent.items() if micro}
    shown = sorted(kernels, key=kernels.__getitem__, reverse=True)[:MOST]
    idle = seconds_of(run, device, 2 * REPEATS).median - 1e3 * sum(kernels.values())
    launches = sum(e.count for e in events) / REPEATS
    metrics = {"kernels_a_step": launches, "milliseconds_without_a_kernel": idle}
    return {"metrics": metrics, "phases": {name: kernels[name] for name in shown}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=2, repeats=9)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    source = load_histogram(HISTOGRAM)
    peers = {peer.name: peer for peer in PEERS}
    contests = []
    for *sizes, trainable, name in SHAPES[device.type]:
        setting = Setting("histogram", *sizes, FORWARD_BACKWARD, trainable, options.dtype)
        prepare = partial(kernels_of, peers[name], setting, source, device, options.seed)
        heads = HeadContests([peers[name]], device, options.seed, judged=False)
        kernels = Entrant(f"kernels of {name}", prepare)
        contests.append(heads.contest(setting, source, others=[kernels], profiled=name))
    return run_session(options, contests)
