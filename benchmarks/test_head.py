"""Time, memory and accuracy of the LM head, ours and the peers'.

An oracle checks the first result of each implementation, ours most strictly, and a wrong one is not timed.
Each round is one product X Wᵀ by the vendor's library, then one call: the table has their ratio. With
`--benchmark-disable` only the results are checked.
"""

from __future__ import annotations

import itertools

from .conftest import DTYPE, ON_GPU, TRAINABLE
from .oracle import LIMITS, OUR_LIMITS, require_right
from .peers import all_peers, ours, peer_named
from .problem import FORWARD_BACKWARD, LOGPROB, PRODUCT, call
from .rows import KINDS

SHAPES = (  # the most telling first
    ("16384x2048x151936", "16384x4096x128256", "16384x896x151936", "16384x1536x151936")
    if ON_GPU
    else ("256x128x4096", "256x128x8000")
)
OURS = [peer.name for peer in ours.PEERS]
AXES = {
    "shape": SHAPES,
    "rows": KINDS[:3],  # real ones have one shape
    "loss": [LOGPROB],
    "mode": [FORWARD_BACKWARD],
    "weight": [TRAINABLE],
    "dtype": [DTYPE],
    "peer": [peer.name for peer in all_peers()],
}


def test_head(peer, problems, oracle, vendor, peak_memory, in_turns, benchmark):
    runs = [peer_named(peer).prepare(problem) for problem in problems]
    outcome = call(runs[0], problems[0])
    benchmark.extra_info["metrics"] = {name: float(of) for name, of in (outcome.certificate or {}).items()}
    benchmark.extra_info["accuracy"] = oracle.judge(problems[0], outcome)
    require_right(benchmark.extra_info["accuracy"], OUR_LIMITS if peer in OURS else LIMITS)
    turns = itertools.cycle(zip(runs, problems, strict=True))

    def repeat() -> None:
        run, problem = next(turns)
        call(run, problem)
        problem.clear()

    for _ in problems:
        repeat()
    peak_memory(repeat)
    in_turns(repeat, vendor, PRODUCT)
