"""From a word in the configuration, or an import path, to a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from grpo_fast.lookup import load_callable
from grpo_fast.objective import covariance, surrogates, trust_region
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.surrogates import PolicyTokens, Surrogate
from grpo_fast.objective.types import LossFunction, LossInputs, LossOutputs

SurrogateFunction = Callable[[PolicyTokens, GRPOLossConfig], Surrogate]

SURROGATES: dict[str, SurrogateFunction] = {
    "clip": surrogates.clip,
    "geometric_mean": surrogates.geometric_mean,
    "cispo": surrogates.cispo,
    "sapo": surrogates.sapo,
    "vespo": surrogates.vespo,
    "reinforce": surrogates.reinforce,
    "clip_cov": covariance.clip_cov,
    "kl_cov": covariance.kl_cov,
    "dppo_tv": trust_region.dppo_tv,
    "dppo_kl": trust_region.dppo_kl,
}


@cache
def load_custom(path: str) -> LossFunction:
    """A user's own loss by import path.

    Args:
        path: `package.module:function`; the function maps `LossInputs` to `LossOutputs`.

    Raises:
        ValueError: the path leads to no function.
        TypeError: when called, the function returns something other than `LossOutputs`.
    """
    function = load_callable(path, "loss_type")

    def checked(inputs: LossInputs) -> LossOutputs:
        outputs = function(inputs)
        if not isinstance(outputs, LossOutputs):
            raise TypeError(
                f"loss_type = {path!r} returned a {type(outputs).__name__}; return "
                "grpo_fast.objective.LossOutputs(loss, metrics)"
            )
        return outputs

    return checked
