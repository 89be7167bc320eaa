"""Check the head on this device at the sizes it is used at, before any time is believed.

Every implementation of ours runs forward and backward on every loss, against the oracle in float64: a minute
on a GPU, with the first compilation. The exit code is 1 where a result is off by more than rounding explains.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from .head import call
from .measure import failure_of
from .oracle import consult, require_right
from .peers import Peer, choose
from .peers.ours import PEERS
from .problem import CROSS_ENTROPY, FORWARD_BACKWARD, GRPO, Setting
from .record import Measurement
from .rows import make_problem
from .session import add_common_arguments, check_common, run_session

SIZES = {  # rows, N, H, V; the last has rows that no tensor descriptor addresses, and a ragged vocabulary
    "cuda": (
        ("histogram", 16_384, 2048, 151_936),
        ("peaked", 8192, 4096, 128_256),
        ("flat", 4096, 896, 151_936),
        ("peaked", 2047, 1004, 50_257),
    ),
    "cpu": (("histogram", 64, 64, 2048), ("peaked", 64, 96, 1000), ("flat", 63, 20, 301)),
}
_GRADIENT = {"float32": 5e-3, "bfloat16": 8e-3, "float16": 8e-3}
"""Several times what rounding gradients to half precision and the default tolerance cost together."""


def judge(
    setting: Setting, peers: Sequence[Peer], device: torch.device, seed: int, *_: float
) -> list[Measurement]:
    """Run each implementation once, and compare its results with the oracle's."""
    problem, cells = make_problem(setting, device, seed), []
    oracle, gradient = consult(problem), _GRADIENT[setting.dtype]
    limits = {"logprob": 1e-4, "loss": 1e-4, "hidden_gradient": gradient, "weight_gradient": gradient}
    for peer in peers:
        cells.append(cell := Measurement(peer.name, vars(setting)))
        try:
            cell.accuracy = oracle.judge(problem, call(peer.prepare(problem), problem))
            require_right(cell.accuracy, limits)
        except Exception as error:
            cell.status, cell.reason = failure_of(error)
    return cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=2, repeats=1)


def main(options: argparse.Namespace) -> int:
    device, settings = check_common(options), []
    for sizes in SIZES[options.device]:
        setting = Setting(*sizes, FORWARD_BACKWARD, True, options.dtype)
        settings += [setting, replace(setting, trainable=False)]
    settings += [replace(settings[0], loss=loss) for loss in (GRPO, CROSS_ENTROPY)]
    peers = choose(list(PEERS), options.impl)
    bouts = [(vars(of), partial(judge, of, peers, device, options.seed)) for of in settings]
    return run_session(options, bouts, strict=True)
