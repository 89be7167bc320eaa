"""One cell: every implementation on the same inputs, interleaved, with the ceiling among them."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .accuracy import Accuracy, Oracle, consult
from .failures import LATE, OK, DeviceLost, failure_of
from .patience import FIRST_CALLS, GRACE, at_most
from .peers import Peer
from .problem import Outcome, Problem, Run, Setting
from .row_sources import Sources, make_problem
from .timing import (
    Memory,
    Spread,
    cache_bytes,
    memory_of,
    seconds_of,
    summarise,
    synchronize,
)

PRODUCT = "one product X Wᵀ"
ROUNDS = 25
SECONDS_PER_PEER = 1.5
"""Of repetitions: a slow implementation gets fewer samples than a fast one, but at least `FEWEST`."""
FEWEST = 3
_MOST_INPUTS = 8


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
    seconds: tuple[float, ...] = ()  # of every repetition, in order


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

    @property
    def patience(self) -> float:
        """Seconds for the first calls of one implementation."""
        return min(FIRST_CALLS, max(0.0, self.deadline - time.monotonic()) + GRACE)


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
            tuple(self.seconds),
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
        _forget_compiled()
        oracle: list[Oracle] = []
        if not self._guard(lambda: self._make_inputs(oracle), *self._contestants):
            return
        self._guard(lambda: self._enter(product, _prepare_product, None), product)
        judge = oracle[0] if oracle else None
        for contestant, peer in zip(entered, self.peers, strict=True):
            if self.limits.passed:
                contestant.failure = LATE, ""
            else:
                self._guard(lambda c=contestant, p=peer: self._enter(c, p.prepare, judge), contestant)
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
        first = self._make(0)
        self._problems.append(first)
        self._output_bytes = first.output_bytes
        sets = min(_MOST_INPUTS, 1 + 2 * cache_bytes(self.device) // first.input_bytes)
        self._problems += [self._make(n) for n in range(1, sets)]
        if self.limits.oracle:
            oracle.append(consult(first))

    def _make(self, number: int) -> Problem:
        return make_problem(self.setting, self.sources, self.device, self.limits.seed + number)

    def _enter(
        self, contestant: _Contestant, prepare: Callable[[Problem], Run], oracle: Oracle | None
    ) -> None:
        with at_most(self.limits.patience):
            self._first_calls(contestant, prepare, oracle)

    def _first_calls(
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
        """Past the deadline only what has entered gets its fewest samples: a cell begun is worth its end."""
        for turn in range(self.limits.rounds):
            for contestant in self._contestants:
                late = self.limits.passed and len(contestant.seconds) >= FEWEST
                if contestant.wants_more and not late:
                    self._guard(lambda c=contestant, t=turn: self._time(c, t), contestant)

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

    def _guard(self, action: Callable[[], None], *contestants: _Contestant) -> bool:
        """Whether it went well. What went wrong becomes the contestants' failure; memory is given back.

        Raises:
            DeviceLost: the device takes no more work, as after an illegal memory access.
        """
        try:
            action()
            synchronize(self.device)
            return True
        except Exception as error:
            failure = failure_of(error)
        for contestant in contestants:
            contestant.failure = failure
            contestant.runs.clear()  # with all that they hold
        try:
            for problem in self._problems:
                problem.clear()
            gc.collect()
            synchronize(self.device)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(contestants[0].name, failure[1]) from lost
        return False


def _forget_compiled() -> None:
    """Dynamo runs a function uncompiled, and says little, once it has seen it at eight shapes."""
    if "torch._inductor.compile_fx" in sys.modules:  # somebody compiled: loading it takes seconds
        torch.compiler.reset()


def _prepare_product(problem: Problem) -> Run:
    """The vendor's library on the same operands, its result written to memory; in parts if it is huge."""
    size = problem.hidden.element_size() * problem.weight.shape[0]
    rows = max(1, min(problem.hidden.shape[0], _product_bytes(problem.hidden.device) // size))
    out = problem.hidden.new_empty((rows, problem.weight.shape[0]), requires_grad=False)

    def run() -> Outcome:
        with torch.no_grad():
            for x in problem.hidden.split(rows):
                torch.mm(x, problem.weight.T, out=out[: len(x)])
        return Outcome()

    return run


def _product_bytes(device: torch.device) -> int:
    """What its result may take, without crowding out the others."""
    return torch.cuda.mem_get_info(device)[0] // 8 if device.type == "cuda" else 1 << 30
