"""`python -m benchmarks head`: the LM head, ours and the peers', in one run on one device."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from .cell import ROUNDS, Cell, CellRun, Limits
from .environment import environment, gpu_state
from .failures import LATE, NOT_INSTALLED, SKIPPED, DeviceLost
from .grid import Grid, cells, default_grid
from .live_tiles import HISTOGRAM, load_histogram
from .losses import LOSSES
from .peers import Peer, all_peers, choose
from .problem import DTYPES, MODES, Setting
from .record import save
from .row_sources import KINDS, Sources, load_real_rows
from .tables import console, print_cell, print_goals, print_notes, print_skipped

DONE, FAILED, INTERRUPTED = 0, 1, 130
INTERRUPTION = "interrupted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget of the whole command (8)")
    for name, what in (("hidden", "hidden sizes H"), ("vocab", "vocabularies V"), ("tokens", "tokens N")):
        parser.add_argument(f"--{name}", type=_positive, nargs="+", help=what)
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
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU unless given")
    parser.add_argument("--impl", nargs="+", metavar="WORD", help="implementations whose name contains it")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="implementations left out")
    parser.add_argument("--repeats", type=_positive, default=ROUNDS, help=f"samples at most ({ROUNDS})")
    parser.add_argument("--seed", type=int, default=0, help="of the made rows (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one, unless given")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything here, after every cell")
    parser.add_argument(
        "--oracle", action=argparse.BooleanOptionalAction, default=True, help="judge the results' accuracy"
    )


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    start = time.monotonic()
    if not options.minutes >= 0:
        raise ValueError(f"--minutes must be at least 0, got {options.minutes}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json {options.json}: its folder does not exist")
    device = _device(options.device)
    histogram = options.histogram
    if histogram is None and device.type == "cuda" and HISTOGRAM.is_file():
        histogram = HISTOGRAM
    sources = Sources(
        None if options.real_rows is None else load_real_rows(options.real_rows),
        None if histogram is None else load_histogram(histogram),
    )
    settings = _settings(options, device, sources)
    peers = [peer for peer in choose(all_peers(), options.impl) if peer.name not in options.without]
    limits = Limits(start + 60 * options.minutes, options.repeats, options.oracle, options.seed)
    return _Session(options, device, sources, peers, limits).run(settings)


class _Session:
    """The cells measured so far, on the screen and in the file."""

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        sources: Sources,
        peers: Sequence[Peer],
        limits: Limits,
    ) -> None:
        self.screen: Console = console()
        self.path: Path | None = options.json
        self.device = device
        self.sources = sources
        self.peers = list(peers)
        self.limits = limits
        self.done: list[Cell] = []
        self.culprit: str | None = None  # the implementation that broke the device
        self.gpu_states: list[dict[str, str] | None] = []
        self.environment = environment(device)
        self.options = {name: _plain(value) for name, value in vars(options).items() if name != "handler"}

    def run(self, settings: Sequence[Setting]) -> int:
        found = self.environment
        self.screen.print(
            f"{found['benchmark_device']}, torch {torch.__version__}, copy "
            f"{found['copy_gigabytes_per_second']:,.0f} GB/s; {len(settings)} cells, the telling ones first\n"
        )
        waiting = list(settings)
        stopped = None
        while waiting and not self.limits.passed and stopped is None:
            stopped = self._measure(waiting.pop(0))
            self._save(waiting, stopped)
        self._save(waiting, stopped)
        self._close(waiting, stopped)
        return {None: DONE, INTERRUPTION: INTERRUPTED}.get(stopped, FAILED)

    def _measure(self, setting: Setting) -> str | None:
        """Why nothing more can be measured, if so; what it had measured is kept."""
        run = CellRun(setting, self.sources, self.device, self.limits, self._installed())
        stopped = None
        try:
            run.measure()
        except KeyboardInterrupt:
            stopped = INTERRUPTION
        except DeviceLost as lost:
            stopped, self.culprit = str(lost), lost.culprit
        self.done.append(run.result())
        self.gpu_states.append(gpu_state(self.device))
        print_cell(self.screen, self.done[-1])
        return stopped

    def _close(self, waiting: Sequence[Setting], stopped: str | None) -> None:
        print_skipped(self.screen, self.done)
        if self.done:
            print_notes(self.screen)
        if waiting:
            why = stopped or "the time budget is spent"
            self.screen.print(
                f"{why}: {len(waiting)} cells not measured, the first: {waiting[0].title}", markup=False
            )
        if self.device.type == "cuda":
            print_goals(self.screen, self.done)
        if self.path is not None:
            self.screen.print(f"written to {self.path}", markup=False)

    def _installed(self) -> list[Peer]:
        """Without those that turned out not to be there, or not to be ready in time: asking again takes as
        long again."""
        missing = {
            result.name
            for cell in self.done
            for result in cell.results
            if (result.state == SKIPPED and result.reason.startswith(NOT_INSTALLED))
            or (result.state == LATE and result.reason)
        }
        return [peer for peer in self.peers if peer.name not in missing]

    def _save(self, waiting: Sequence[Setting], stopped: str | None) -> None:
        if self.path is None:
            return
        save(
            self.path,
            self.done,
            environment=self.environment,
            options=self.options,
            gpu_states=self.gpu_states,
            not_measured=[asdict(setting) for setting in waiting],
            stopped=stopped,
            culprit=self.culprit,
        )


def _settings(options: argparse.Namespace, device: torch.device, sources: Sources) -> list[Setting]:
    given = {"real": sources.real is not None, "histogram": sources.histogram is not None}
    rows = options.rows or [kind for kind in ("real", "histogram", "peaked", "flat") if given.get(kind, True)]
    for kind, flag in (("real", "--real-rows"), ("histogram", "--histogram")):
        if kind in rows and not given[kind]:
            raise ValueError(f"--rows {kind} needs {flag} FILE; `python -m benchmarks rows` makes one")
    usual = default_grid(device.type, tuple(rows))
    grid = Grid(
        rows=usual.rows,
        tokens=tuple(options.tokens or usual.tokens),
        hidden=tuple(options.hidden or usual.hidden),
        vocabulary=tuple(options.vocab or usual.vocabulary),
        modes=tuple(options.mode or usual.modes),
        trainable=(True,) if options.trainable else (False,) if options.frozen else usual.trainable,
        dtype=options.dtype or usual.dtype,
        losses=tuple(options.loss or usual.losses),
        losses_at_all_sizes=options.loss is not None,
    )
    return cells(grid, None if sources.real is None else tuple(sources.real.weight.shape))


def _device(wanted: str | None) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    return torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))


def _positive(text: str) -> int:
    value = int(text.replace(",", "").replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
