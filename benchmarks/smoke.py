"""`python -m benchmarks smoke`: is the head right on this device, at the sizes it is used at?

Every implementation of ours, forward and backward, on every loss, against the oracle in float64. A minute on
a GPU, first compilation included; worth it before any time is believed. The exit code is 1 where a result is
further off than rounding explains.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from .head import HeadContests
from .live_tiles import HISTOGRAM, load_histogram
from .measure import OK, SKIPPED
from .peers import choose
from .peers.ours import PEERS
from .problem import CROSS_ENTROPY, FORWARD_BACKWARD, GRPO, PRODUCT, Setting
from .record import Measurement
from .session import add_common_arguments, check_common, run_session
from .tables import label

_SIZES = {  # rows, N, H, V; the last has rows that no tensor descriptor addresses, and a ragged vocabulary
    "cuda": (
        ("histogram", 16_384, 2048, 151_936),
        ("peaked", 8192, 4096, 128_256),
        ("flat", 4096, 896, 151_936),
        ("peaked", 2047, 1004, 50_257),
    ),
    "cpu": (("histogram", 64, 64, 2048), ("peaked", 64, 96, 1000), ("flat", 63, 20, 301)),
}
_GRADIENT_ERROR = {"float32": 5e-3, "bfloat16": 8e-3, "float16": 8e-3}
"""Several times what rounding gradients to half precision and the default tolerance cost together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=2, repeats=1)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    histogram = load_histogram(HISTOGRAM)
    heads = HeadContests(choose(list(PEERS), options.impl), device, options.seed)
    contests = []
    for rows, *sizes in _SIZES[options.device]:
        source = histogram if rows == "histogram" else None
        first = Setting(rows, *sizes, FORWARD_BACKWARD, True, options.dtype)
        settings = [first, replace(first, trainable=False)]
        if not contests:
            settings += [replace(first, loss=loss) for loss in (GRPO, CROSS_ENTROPY)]
        contests += [heads.contest(setting, source) for setting in settings]
    code = run_session(options, contests)
    found = [one for contest in contests for one in contest.results() if one.implementation != PRODUCT]
    failed = [one for one in found if _fault(one)]
    right = [one for one in found if one.status == OK and not _fault(one)]
    for one in failed:
        print(f"{one.implementation} at {label(one.shape)}: {_fault(one)}")
    verdict = "WRONG, do not believe any time" if failed else "right" if right else "nothing was tried"
    print(f"smoke: {verdict}; {len(right)} of {len(found)} trials right", flush=True)
    return code or int(bool(failed) or not right)


def _fault(found: Measurement) -> str:
    """Why a result must not be believed; empty for a right one, and for one that was not tried."""
    if found.status != OK:
        return "" if found.status == SKIPPED else found.reason or found.status
    gradient = _GRADIENT_ERROR[found.shape["dtype"]]
    limits = {"logprob": 1e-4, "loss": 1e-4, "hidden_gradient": gradient, "weight_gradient": gradient}
    return ", ".join(
        f"{name.replace('_', ' ')} off by {error:.1e}"
        for name, error in found.accuracy.items()
        if not error <= limits[name]
    )
