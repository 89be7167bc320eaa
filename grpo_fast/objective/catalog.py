"""The policy losses by name: what each one is made of, and the paper that defines it.

A policy loss is a sum over tokens of  weight × (surrogate + β · KL).  The surrogate is a function in
`surrogates.py` or `covariance.py`, the weight comes from the aggregation, the ratio from its level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Aggregation = Literal["sequence_mean", "token_mean", "constant_length", "sequence_sum"]
RatioLevel = Literal["token", "sequence", "sequence_token", "product"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class LossFacts:
    """One row of the catalogue."""

    paper: str
    surrogate: str  # its name in `registry.SURROGATES`
    aggregation: Aggregation
    level: RatioLevel = "token"  # of the importance ratio, unless the config chooses another
    choosable_levels: tuple[RatioLevel, ...] = ("token",)
    epsilon: tuple[float | None, float | None] | None = None  # the paper's (low, high); None: no clipping
    fields: frozenset[str] = frozenset()  # configuration fields that this loss alone, or few, read
    kl_estimator: KLEstimator = "k3"
    forbids_kl: str = ""  # why a KL term is refused


_CLIP_LEVELS: tuple[RatioLevel, ...] = ("token", "sequence", "sequence_token")
_CLIP_FIELDS = frozenset({"epsilon_low", "epsilon_high", "delta"})
_RANGE_FIELDS = frozenset({"epsilon_low", "epsilon_high"})


def _clip(paper: str, aggregation: Aggregation, **changes: object) -> LossFacts:
    facts = LossFacts(paper, "clip", aggregation, "token", _CLIP_LEVELS, (0.2, 0.2), _CLIP_FIELDS)
    return replace(facts, **changes)


CATALOG: dict[str, LossFacts] = {
    "grpo": _clip("DeepSeekMath, arXiv 2402.03300, eq. 3", "sequence_mean"),
    "bnpo": _clip("batch-normalised tokens, as in TRL; over a whole step it is dapo", "token_mean"),
    "dr_grpo": _clip("Dr. GRPO, arXiv 2503.20783, section 3.2", "constant_length"),
    "dapo": _clip("DAPO, arXiv 2503.14476, eq. 8", "token_mean"),
    "gspo": _clip(
        "GSPO, arXiv 2507.18071, eq. 5 and 7",
        "sequence_mean",
        level="sequence",
        choosable_levels=("sequence",),
        epsilon=(3e-4, 4e-4),
    ),
    "gspo_token": _clip(
        "GSPO-token, arXiv 2507.18071, eq. 13 and 14",
        "sequence_mean",
        level="sequence_token",
        choosable_levels=("sequence_token",),
        epsilon=(3e-4, 4e-4),
    ),
    "luspo": _clip(
        "LUSPO, arXiv 2602.05261",
        "sequence_sum",
        level="sequence",
        choosable_levels=("sequence", "sequence_token"),
        epsilon=(2e-3, 2.5e-3),
    ),
    "rloo": _clip(
        "RLOO, arXiv 2402.14740, eq. 8, with PPO's clip on the ratio of the whole completion",
        "sequence_mean",
        level="product",
        choosable_levels=(),
    ),
    "reinforce_plus_plus_baseline": _clip(
        "REINFORCE++-baseline, arXiv 2501.03262", "token_mean", kl_estimator="k2"
    ),
    "gmpo": LossFacts(
        "GMPO, arXiv 2507.20673, eq. 4",
        "geometric_mean",
        "sequence_mean",
        epsilon=(0.4, 0.4),
        fields=_RANGE_FIELDS,
    ),
    "cispo": LossFacts(
        "CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the ceiling is absolute as in arXiv 2510.13786",
        "cispo",
        "token_mean",
        epsilon=(None, 5.0),
        fields=frozenset({"epsilon_high"}),
    ),
    "sapo": LossFacts(
        "SAPO, arXiv 2511.20347, eq. 5 and 6",
        "sapo",
        "sequence_mean",
        fields=frozenset({"sapo_temperature_pos", "sapo_temperature_neg"}),
    ),
    "vespo": LossFacts(
        "VESPO, arXiv 2602.10693",
        "vespo",
        "token_mean",
        fields=frozenset({"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"}),
    ),
    "gpg": LossFacts(
        "GPG, arXiv 2504.02546, eq. 5",
        "reinforce",
        "token_mean",
        choosable_levels=(),
        forbids_kl="GPG is defined without a reference model; use loss_type='reinforce' to add one",
    ),
    "reinforce": LossFacts("REINFORCE, Williams 1992", "reinforce", "sequence_sum", choosable_levels=()),
    "clip_cov": _clip(
        "Clip-Cov, arXiv 2505.22617, eq. 11",
        "token_mean",
        surrogate="clip_cov",
        choosable_levels=("token",),
        fields=_RANGE_FIELDS | {"clip_cov_ratio", "clip_cov_low", "clip_cov_high"},
    ),
    "kl_cov": LossFacts(
        "KL-Cov, arXiv 2505.22617, eq. 12",
        "kl_cov",
        "token_mean",
        fields=frozenset({"kl_cov_ratio", "kl_cov_coef"}),
    ),
    "dppo_tv": LossFacts(
        "DPPO-Binary-TV, arXiv 2602.04879",
        "dppo_tv",
        "token_mean",
        epsilon=(0.15, 0.15),
        fields=_RANGE_FIELDS | {"dppo_ratio_max"},
    ),
    "dppo_kl": LossFacts(
        "DPPO-Binary-KL, arXiv 2602.04879",
        "dppo_kl",
        "token_mean",
        epsilon=(0.05, 0.05),
        fields=_RANGE_FIELDS | {"dppo_ratio_max"},
    ),
}

LOSS_TYPES = tuple(CATALOG)
