"""One cell: every implementation on the same inputs, interleaved, with the ceiling among them."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.accuracy import Accuracy, Oracle, consult
from benchmarks.peers import Peer, Unsupported
from benchmarks.problem import Outcome, Problem, Run, Setting
from benchmarks.row_sources import Sources, make_problem
from benchmarks.timing import (
    Memory,
    Spread,
    cache_bytes,
    memory_of,
    seconds_of,
    summarise,
    synchronize,
)

PRODUCT = "one product X Wᵀ"
OK, SKIPPED, OOM, ERROR, LATE = "ok", "skipped", "out of memory", "error", "no time left"
ROUNDS = 25
SECONDS_PER_PEER = 1.5
"""Of repetitions: a slow implementation gets fewer samples than a fast one, but at least `FEWEST`."""
FEWEST = 3
_MOST_INPUTS = 8
_PRODUCT_BYTES = 8 << 30


@dataclass(frozen=True)
class Result:
    """One implementation in one cell."""

    name: str
    state: str  # OK, SKIPPED, OOM, ERROR or LATE
    reason: str = ""  # of any other state than OK
    time: Spread | None = None
    first_call: float | None = None  # seconds, with imports and compilation
    memory: Memory | None = None
    accuracy: Accuracy | None = None
    certificate: dict[str, float] | None = None


@dataclass(frozen=True)
class Cell:
    """What one setting gave."""

    setting: Setting
    rows: str  # where the rows come from, in words
    input_sets: int
    output_bytes: int
    product: Spread | None  # the ceiling
    results: list[Result]


@dataclass(frozen=True)
class Limits:
    """Of the whole command."""

    deadline: float  # on the monotonic clock
    rounds: int = ROUNDS
    oracle: bool = True
    seed: int = 0

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.deadline


@dataclass
class _Contestant:
    """An implementation on its way through the cell."""

    name: str
    runs: list[Run] = field(default_factory=list)  # one for each set of inputs
    seconds: list[float] = field(default_factory=list)
    failure: tuple[str, str] | None = None  # state, reason
    first_call: float | None = None
    memory: Memory | None = None
    accuracy: Accuracy | None = None
    certificate: dict[str, float] | None = None

    @property
    def wants_more(self) -> bool:
        enough = len(self.seconds) >= FEWEST and sum(self.seconds) >= SECONDS_PER_PEER
        return self.failure is None and not enough

    def result(self) -> Result:
        state, reason = self.failure or ((OK, "") if self.seconds else (LATE, ""))
        return Result(
            self.name,
            state,
            reason,
            summarise(self.seconds) if self.seconds and state == OK else None,
            self.first_call,
            self.memory,
            self.accuracy,
            self.certificate,
        )


class CellRun:
    """Measures one cell. `result` is complete at any time, so an interruption loses nothing measured."""

    def __init__(
        self, setting: Setting, sources: Sources, device: torch.device, limits: Limits, peers: Sequence[Peer]
    ) -> None:
        self.setting = setting
        self.sources = sources
        self.device = device
        self.limits = limits
        self.peers = peers
        self._problems: list[Problem] = []
        self._contestants: list[_Contestant] = []
        self._output_bytes = 0

    def measure(self) -> None:
        """Inputs, oracle, each implementation once for correctness and memory, then all in turn for time."""
        self._contestants = [_Contestant(PRODUCT), *(_Contestant(peer.name) for peer in self.peers)]
        product, *entered = self._contestants
        oracle: list[Oracle] = []
        failure = self._guard(lambda: self._make_inputs(oracle))
        if failure:
            state, reason = failure
            for contestant in self._contestants:
                contestant.failure = state, f"while making the inputs: {reason}".rstrip(": ")
            return
        product.failure = self._guard(lambda: self._enter(product, _prepare_product, None))
        for contestant, peer in zip(entered, self.peers, strict=True):
            if self.limits.passed:
                contestant.failure = LATE, ""
                continue
            judge = oracle[0] if oracle else None
            contestant.failure = self._guard(
                lambda c=contestant, p=peer, o=judge: self._enter(c, p.prepare, o)
            )
        self._repeat()

    def result(self) -> Cell:
        product, *entered = self._contestants
        return Cell(
            self.setting,
            self.sources.describe(self.setting),
            len(self._problems),
            self._output_bytes,
            product.result().time,
            [contestant.result() for contestant in entered],
        )

    def _make_inputs(self, oracle: list[Oracle]) -> None:
        """Enough sets that a turn finds nothing of its inputs in the cache; the first is judged."""
        make = lambda n: make_problem(self.setting, self.sources, self.device, self.limits.seed + n)  # noqa: E731
        self._problems.append(make(0))
        first = self._problems[0]
        self._output_bytes = first.output_bytes
        sets = min(_MOST_INPUTS, 1 + 2 * cache_bytes(self.device) // first.input_bytes)
        self._problems += [make(n) for n in range(1, sets)]
        if self.limits.oracle:
            oracle.append(consult(first))

    def _enter(
        self, contestant: _Contestant, prepare: Callable[[Problem], Run], oracle: Oracle | None
    ) -> None:
        start = time.perf_counter()
        first = self._problems[0]
        contestant.runs = [prepare(first)]
        outcome = self._call(contestant.runs[0], first)
        contestant.first_call = time.perf_counter() - start
        if oracle is not None:
            contestant.accuracy = oracle.judge(first, outcome)
        if outcome.certificate is not None:
            contestant.certificate = {name: float(value) for name, value in outcome.certificate.items()}
        del outcome
        first.clear()
        contestant.memory = memory_of(lambda: self._call(contestant.runs[0], first), self.device)
        first.clear()
        for problem in self._problems[1:]:
            contestant.runs.append(prepare(problem))
            self._call(contestant.runs[-1], problem)
            problem.clear()

    def _repeat(self) -> None:
        for turn in range(self.limits.rounds):
            for contestant in self._contestants:
                if self.limits.passed:
                    return
                if contestant.wants_more:
                    contestant.failure = self._guard(lambda c=contestant, t=turn: self._time(c, t))

    def _time(self, contestant: _Contestant, turn: int) -> None:
        which = turn % len(self._problems)
        problem = self._problems[which]
        contestant.seconds.append(
            seconds_of(lambda: self._call(contestant.runs[which], problem), self.device)
        )
        problem.clear()

    @staticmethod
    def _call(run: Run, problem: Problem) -> Outcome:
        with contextlib.nullcontext() if problem.backward else torch.no_grad():
            return run()

    def _guard(self, action: Callable[[], None]) -> tuple[str, str] | None:
        """What went wrong, as a state and a reason, with the memory given back; None if nothing did."""
        failure = None
        try:
            action()
            synchronize(self.device)
        except (ImportError, Unsupported) as error:
            missing = isinstance(error, ImportError)
            failure = SKIPPED, f"not installed: {error}" if missing else str(error)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                failure = OOM, ""
            else:
                failure = ERROR, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if failure is not None:
            for problem in self._problems:
                problem.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return failure


def _prepare_product(problem: Problem) -> Run:
    """The vendor's library on the same operands, its result written to memory once, in parts if it is huge."""
    size = problem.hidden.element_size() * problem.weight.shape[0]
    rows = max(1, min(problem.hidden.shape[0], _PRODUCT_BYTES // size))
    out = problem.hidden.new_empty((rows, problem.weight.shape[0]), requires_grad=False)

    def run() -> Outcome:
        with torch.no_grad():
            for x in problem.hidden.split(rows):
                torch.mm(x, problem.weight.T, out=out[: len(x)])
        return Outcome()

    return run
