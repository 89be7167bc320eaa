"""`python -m benchmarks kernels`: each kernel of ours alone, against what the device can do at best.

The ceilings are measured among them: the product X Wᵀ by the vendor's library on the same operands, and a
copy. `of ceiling` is the roofline: the time that the kernel's arithmetic and its least traffic need at those
rates, as a part of the time it took. On a CPU the parts of the plain torch path are measured in the kernels'
place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from . import ceilings
from .contest import Contest, Entrant
from .kernel_cases import ON_CPU, ON_CUDA, KernelInputs, entrants
from .live_tiles import HISTOGRAM, load_histogram
from .problem import FORWARD_BACKWARD, Setting
from .row_sources import Sources
from .session import add_common_arguments, check_common, choose_names, positive, run_session

KIND = "kernels"
ROWS = ("peaked", "flat", "histogram")
_DEFAULTS = {"cuda": ((16_384,), (2048, 4096), (151_936,)), "cpu": ((256,), (256,), (8192,))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=4)
    for name, what in (("tokens", "tokens N"), ("hidden", "hidden sizes H"), ("vocab", "vocabularies V")):
        parser.add_argument(f"--{name}", type=positive, nargs="+", help=what)
    parser.add_argument("--rows", choices=ROWS, help="histogram where there is one, else peaked")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="live tiles of a model's rows, JSON")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    histogram = options.histogram
    if histogram is None and device.type == "cuda" and HISTOGRAM.is_file():
        histogram = HISTOGRAM
    rows = options.rows or ("histogram" if histogram else "peaked")
    if rows == "histogram" and histogram is None:
        raise ValueError("--rows histogram needs --histogram FILE; `python -m benchmarks tiles` makes one")
    sources = Sources(histogram=load_histogram(histogram) if histogram else None)
    names = choose_names(ON_CUDA if device.type == "cuda" else ON_CPU, options.impl)
    tokens, hidden, vocabulary = _DEFAULTS[device.type]
    settings = [
        Setting(rows, n, h, v, FORWARD_BACKWARD, True, options.dtype)
        for v in options.vocab or vocabulary
        for h in options.hidden or hidden
        for n in options.tokens or tokens
    ]
    bouts = [contest(setting, sources, names, device, options.seed) for setting in settings]
    return run_session(KIND, options, device, bouts)


def contest(
    setting: Setting, sources: Sources, names: Sequence[str], device: torch.device, seed: int
) -> Contest:
    """The kernels of these names at one shape, with both ceilings."""
    inputs = KernelInputs(setting, sources, device, seed)
    shape = {
        "tokens": setting.tokens,
        "hidden": setting.hidden,
        "vocabulary": setting.vocabulary,
        "rows": setting.rows,
        "dtype": setting.dtype,
    }
    bounds: list[Entrant] = [
        ceilings.product(setting.tokens, setting.hidden, setting.vocabulary, setting.dtype, device, seed),
        ceilings.copy(device),
    ]
    return Contest(shape, [*bounds, *entrants(inputs, names)], device)
