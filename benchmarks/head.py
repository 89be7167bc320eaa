"""`python -m benchmarks head`: the LM head, ours and the peers', in one run on one device."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from .goals import is_goal, verdicts
from .head_contest import HeadContests
from .live_tiles import given_histogram
from .peers import all_peers, choose
from .problem import FORWARD, LOSSES, MODES, Setting
from .record import Measurement
from .rows import KINDS, Source, describe, load_real_rows
from .session import add_common_arguments, add_sizes, check_common, run_session

SIZES = {  # the most telling first
    "tokens": ((16_384, 4096, 65_536, 1024), (256,), "tokens N"),
    "hidden": ((2048, 4096, 896, 1536), (128,), "hidden sizes H"),
    "vocab": ((151_936, 128_256, 32_000, 262_144), (4096, 8000), "vocabularies V"),
}


def settings_of(
    axes: Mapping[str, Sequence[Any]],
    *,
    losses_at_all_sizes: bool = False,
    real_shape: tuple[int, int] | None = None,
) -> list[Setting]:
    """All settings, the design's goal rows first, then by distance from the first value of every axis.

    Every other loss counts as next to the first: they differ in little but the end.

    Args:
        axes: values of each field of `Setting`, the most telling first.
        losses_at_all_sizes: or those after the first at the first sizes alone.
        real_shape: (V, H) of the model whose own rows were given; "real" has no others.
    """
    ranked: dict[Setting, tuple[bool, int]] = {}
    for places in product(*(range(len(values)) for values in axes.values())):
        at = dict(zip(axes, places, strict=True))
        loss = at.pop("loss")
        if loss and (at["tokens"] or at["hidden"] or at["vocabulary"]) and not losses_at_all_sizes:
            continue
        fields = {name: values[place] for (name, values), place in zip(axes.items(), places, strict=True)}
        if fields["rows"] == "real":
            fields["vocabulary"], fields["hidden"] = real_shape
        fields["trainable"] = fields["trainable"] or fields["mode"] == FORWARD
        setting = Setting(**fields)
        rank = (not is_goal(fields), sum(at.values()) + bool(loss))
        ranked[setting] = min(rank, ranked.get(setting, rank))
    return sorted(ranked, key=lambda setting: ranked[setting])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8)
    add_sizes(parser, SIZES, nargs="+")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="both unless given")
    parser.add_argument(
        "--loss",
        nargs="+",
        choices=LOSSES,
        help="all unless given, those after logprob at the first sizes alone",
    )
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--frozen", action="store_true", help="only with a frozen head")
    head.add_argument("--trainable", action="store_true", help="only with a trainable head")
    parser.add_argument("--rows", nargs="+", choices=KINDS, help="those that can be made, unless given")
    parser.add_argument("--real-rows", type=Path, metavar="FILE", help="safetensors: hidden, target, weight")
    parser.add_argument(
        "--histogram",
        type=Path,
        metavar="FILE",
        help="live tiles of a model's rows, JSON (on a GPU the checked-in one of Qwen2.5-Coder-1.5B)",
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="implementations left out")


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    real = None if options.real_rows is None else load_real_rows(options.real_rows)
    sources: dict[str, Source] = {"real": real, "histogram": given_histogram(options.histogram, device)}
    usual = [kind for kind in ("real", "histogram", "peaked", "flat") if sources.get(kind, kind) is not None]
    rows = options.rows or usual
    for kind, flag in (("real", "--real-rows"), ("histogram", "--histogram")):
        if kind in rows and sources[kind] is None:
            raise ValueError(f"--rows {kind} needs {flag} FILE; `python -m benchmarks rows` makes one")
    axes = {
        "rows": rows,
        "mode": options.mode,
        "trainable": (True,) if options.trainable else (False,) if options.frozen else (True, False),
        "tokens": options.tokens,
        "hidden": options.hidden,
        "vocabulary": options.vocab,
        "loss": options.loss or LOSSES,
        "dtype": (options.dtype,),
    }
    settings = settings_of(
        axes,
        losses_at_all_sizes=options.loss is not None,
        real_shape=None if real is None else tuple(real.weight.shape),
    )
    peers = [peer for peer in choose(all_peers(), options.impl) if peer.name not in options.without]
    contests = HeadContests(peers, device, options.seed)
    return run_session(
        options,
        [contests.contest(setting, sources.get(setting.rows)) for setting in settings],
        close=_print_goals if device.type == "cuda" else lambda *_: None,
        notes=list(dict.fromkeys(describe(setting, sources.get(setting.rows)) for setting in settings)),
    )


def _print_goals(screen: Console, cells: Sequence[Measurement]) -> None:
    screen.print("Goals of the design (N = 16,384, a model's rows or made to match its live tiles):")
    for verdict in verdicts(cells):
        style = "green" if verdict.met else "dim" if verdict.found is None else "red"
        screen.print(Text(f"  {verdict}", style=style))
