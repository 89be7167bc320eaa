"""Apple's Cut Cross Entropy: its gradients filtered, which is the default, exact, and summed à la Kahan.

The presets came after 25.1.1, the newest release of the package index. That one is exact without its filter,
and has no compensated sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..problem import CROSS_ENTROPY, Outcome, Problem, Run
from . import Peer, Unsupported, require_cuda

FILTERED, EXACT, KAHAN = "cce", "cce_exact", "cce_kahan_full_c"


def prepare(problem: Problem, preset: str) -> Run:
    require_cuda(problem)
    from cut_cross_entropy import LinearCrossEntropyImpl, linear_cross_entropy

    options = _options(preset, set(LinearCrossEntropyImpl.__members__))

    mean = problem.loss == CROSS_ENTROPY
    options["reduction"] = "mean" if mean else "none"

    def run() -> Outcome:
        found = linear_cross_entropy(problem.hidden, problem.weight, problem.targets, **options)
        return problem.finish_loss(found) if mean else problem.finish(-found.float())

    return run


def _options(preset: str, known: set[str]) -> dict[str, Any]:
    if preset.upper() in known:
        return {"impl": preset}
    if preset == EXACT:
        return {"filter_eps": None}
    raise Unsupported(f"this cut-cross-entropy has no preset {preset}: install it from its repository")


PEERS = (
    Peer("Cut Cross Entropy (filtered)", partial(prepare, preset=FILTERED)),
    Peer("Cut Cross Entropy (exact)", partial(prepare, preset=EXACT)),
    Peer("Cut Cross Entropy (Kahan)", partial(prepare, preset=KAHAN)),
)
