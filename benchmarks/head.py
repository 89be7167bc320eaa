"""`python -m benchmarks head`: the LM head, ours and the peers', in one run on one device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .goals import is_goal, verdicts
from .head_contest import HeadContests
from .live_tiles import given_histogram
from .peers import all_peers, choose
from .problem import FORWARD, LOSSES, MODES, Setting
from .record import Measurement
from .rows import KINDS, Sources, load_real_rows
from .session import add_common_arguments, check_common, positive, run_session

KIND = "head"


@dataclass(frozen=True)
class Grid:
    """The axes, each with its most telling value first."""

    rows: tuple[str, ...]
    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    vocabulary: tuple[int, ...]
    modes: tuple[str, ...]
    trainable: tuple[bool, ...]
    dtype: str
    losses: tuple[str, ...] = LOSSES
    losses_at_all_sizes: bool = False  # or those after the first at the first sizes alone


def default_grid(device_kind: str, rows: tuple[str, ...], dtype: str) -> Grid:
    if device_kind == "cuda":
        sizes = (16_384, 4096, 65_536, 1024), (2048, 4096, 896, 1536), (151_936, 128_256, 32_000, 262_144)
    else:
        sizes = (256,), (128,), (4096, 8000)
    return Grid(rows, *sizes, MODES, (True, False), dtype)


def settings_of(grid: Grid, real_shape: tuple[int, int] | None) -> list[Setting]:
    """All settings, the design's goal rows first, then by distance from the first value of every axis.

    Every other loss counts as next to the first: they differ in little but the end.

    Args:
        real_shape: (V, H) of the model whose own rows were given; "real" has no others.
    """
    ranked: dict[Setting, tuple[bool, int]] = {}
    axes = (grid.rows, grid.modes, grid.trainable, grid.tokens, grid.hidden, grid.vocabulary, grid.losses)
    for places in product(*(range(len(axis)) for axis in axes)):
        *others, loss = places
        if loss and any(places[3:6]) and not grid.losses_at_all_sizes:
            continue
        rows, mode, trainable, tokens, hidden, vocabulary, name = (
            axis[place] for axis, place in zip(axes, places, strict=True)
        )
        if rows == "real":
            vocabulary, hidden = real_shape
        setting = Setting(
            rows, tokens, hidden, vocabulary, mode, trainable or mode == FORWARD, grid.dtype, name
        )
        rank = (not is_goal(vars(setting)), sum(others) + bool(loss))
        ranked[setting] = min(rank, ranked.get(setting, rank))
    return sorted(ranked, key=lambda setting: ranked[setting])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8)
    for name, what in (("hidden", "hidden sizes H"), ("vocab", "vocabularies V"), ("tokens", "tokens N")):
        parser.add_argument(f"--{name}", type=positive, nargs="+", help=what)
    parser.add_argument("--mode", nargs="+", choices=MODES, help="both unless given")
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
    parser.add_argument(
        "--oracle", action=argparse.BooleanOptionalAction, default=True, help="judge the results' accuracy"
    )


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    sources = Sources(
        None if options.real_rows is None else load_real_rows(options.real_rows),
        given_histogram(options.histogram, device),
    )
    settings = _settings(options, device.type, sources)
    peers = [peer for peer in choose(all_peers(), options.impl) if peer.name not in options.without]
    contests = HeadContests(peers, sources, device, options.seed, options.oracle)
    return run_session(
        KIND,
        options,
        device,
        [contests.contest(setting) for setting in settings],
        close=_print_goals if device.type == "cuda" else lambda *_: None,
        notes=list(dict.fromkeys(sources.describe(setting) for setting in settings)),
    )


def _settings(options: argparse.Namespace, device_kind: str, sources: Sources) -> list[Setting]:
    given = {"real": sources.real is not None, "histogram": sources.histogram is not None}
    rows = options.rows or [kind for kind in ("real", "histogram", "peaked", "flat") if given.get(kind, True)]
    for kind, flag in (("real", "--real-rows"), ("histogram", "--histogram")):
        if kind in rows and not given[kind]:
            raise ValueError(f"--rows {kind} needs {flag} FILE; `python -m benchmarks rows` makes one")
    asked = {
        "tokens": options.tokens,
        "hidden": options.hidden,
        "vocabulary": options.vocab,
        "modes": options.mode,
        "losses": options.loss,
        "trainable": (True,) if options.trainable else (False,) if options.frozen else None,
    }
    usual = default_grid(device_kind, tuple(rows), options.dtype)
    grid = replace(usual, losses_at_all_sizes=options.loss is not None,
                   **{name: tuple(values) for name, values in asked.items() if values})  # fmt: skip
    return settings_of(grid, None if sources.real is None else tuple(sources.real.weight.shape))


def _print_goals(screen: Console, cells: Sequence[Measurement]) -> None:
    screen.print("Goals of the design (N = 16,384, a model's rows or made to match its live tiles):")
    for verdict in verdicts(cells):
        style = "green" if verdict.met else "dim" if verdict.found is None else "red"
        screen.print(Text(f"  {verdict}", style=style))
