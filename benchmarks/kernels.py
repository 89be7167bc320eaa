"""Measure each kernel of the head in its place: one forward and backward under torch's profiler.

One product X Wᵀ by the vendor's library is profiled in the same run. `idle` is the time of a step without the
profiler in which no kernel runs. On a CPU the kernels are torch's operations.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from statistics import median

import torch
from torch import profiler

from .head import call, multiplication
from .measure import Stopwatch, synchronize
from .peers import Peer, choose
from .peers.ours import PEERS
from .problem import FORWARD_BACKWARD, PRODUCT, Setting
from .record import Measurement
from .rows import KINDS, make_problem
from .session import add_common_arguments, add_sizes, check_common, run_session

SIZES = {
    "tokens": ([16_384], [256], "tokens N"),
    "hidden": ([2048, 4096], [256], "hidden sizes H"),
    "vocab": ([151_936], [8192], "vocabularies V"),
}
IDLE = "idle"
_USUAL = ("ours", "ours, tolerance 0")
_LEAST_SHARE = 0.01  # of a step's time: kernels that take less are left out


def profile(
    setting: Setting, peer: Peer, device: torch.device, seed: int, _: float, steps: int
) -> list[Measurement]:
    """Measure the kernels in steps of one implementation, and one product."""
    shape, watch = {"profiled": peer.name} | vars(setting), Stopwatch(device)
    problem = make_problem(setting, device, seed)
    run = partial(call, peer.prepare(problem), problem)
    multiply = partial(multiplication([(problem.hidden.detach(), problem.weight.detach())]), None)
    timed, products = ([watch.time(one)[0] for _ in range(1 + steps)][1:] for one in (run, multiply))
    activity, kind = profiler.ProfilerActivity, torch.autograd.DeviceType
    on_gpu = device.type == "cuda"
    with profiler.profile(activities=[activity.CPU, *[activity.CUDA] * on_gpu]) as profiled:
        for _ in range(steps):
            run()
        synchronize(device)
    events = [e for e in profiled.key_averages() if e.device_type == (kind.CUDA if on_gpu else kind.CPU)]
    spent = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6 / steps for e in events]
    cells = [Measurement(PRODUCT, shape, seconds=products)]
    for event, seconds in zip(events, spent, strict=True):
        if seconds > _LEAST_SHARE * sum(spent):
            metrics = {"launches": event.count / steps}
            cells.append(Measurement(event.key[:80], shape, seconds=[seconds], metrics=metrics))
    return [*cells, Measurement(IDLE, shape, seconds=[max(0.0, median(timed) - sum(spent))])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=4, repeats=5)
    add_sizes(parser, SIZES, nargs="+")
    parser.add_argument("--rows", choices=KINDS, default="histogram", help="(%(default)s)")


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    peers = [peer for peer in choose(list(PEERS), options.impl) if options.impl or peer.name in _USUAL]
    bouts = []
    for v, h, n in itertools.product(options.vocab, options.hidden, options.tokens):
        setting = Setting(options.rows, n, h, v, FORWARD_BACKWARD, True, options.dtype)
        for peer in peers:
            given = setting, peer, device, options.seed
            bouts.append(({"profiled": peer.name} | vars(setting), partial(profile, *given)))
    return run_session(options, bouts)
