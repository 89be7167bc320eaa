"""The private names of other trainers that adapters use, and the versions that have them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata
from operator import attrgetter
from typing import Any, NamedTuple


class Host(NamedTuple):
    """A library with trainers, for which there is an adapter."""

    versions: str  # that the adapter was tested with
    names: Mapping[str, str]  # separated by spaces, by module of the library
    distribution: str  # that pip installs


_AXOLOTL = "AsyncGRPOTrainer._get_per_token_logps"
HOSTS = {
    "axolotl": Host(
        ">=0.21,<0.22",
        {
            "core.trainers.grpo.trainer": "GRPOTrainer._full_logits_logps",
            "core.trainers.grpo.async_trainer": f"{_AXOLOTL}_and_entropies {_AXOLOTL}_flattened "
            f"{_AXOLOTL}_and_entropies_flattened "
            "selective_log_softmax entropy_from_logits _fused_selective_log_softmax",
        },
        "axolotl",
    ),
    "nemo_rl": Host(
        ">=0.6,<0.8",
        {
            "algorithms.loss.interfaces": "LossInputType.LOGPROB LossType",
            "distributed.model_utils": "from_parallel_hidden_states_to_logprobs",
        },
        "nemo-rl",
    ),
    "openrlhf": Host(
        ">=0.11.2,<0.12",
        {
            "models.actor": "Actor.forward unpad_and_slice_tensor log_probs_from_logits compute_entropy",
            "models.loss": "PolicyLoss.forward",
        },
        "openrlhf",
    ),
    "prime_rl": Host(
        ">=0.8,<0.10",
        {
            "trainer.models.layers.lm_head": "FusedOutputLinear.forward",
            "trainer.models.layers.lm_head_gemma": "GemmaFusedOutputLinear.forward",
            "trainer.rl.loss": "LossOutputs",
        },
        "prime-rl",
    ),
    "skyrl": Host(
        ">=0.4,<0.5",
        {
            "backends.skyrl_train.workers.model_wrapper": (
                "HFModelWrapper.forward logprobs_from_logits ulysses_pad_and_slice_inputs"
            ),
            "backends.skyrl_train.utils.ppo_utils": "PolicyLossRegistry apply_off_policy_correction",
        },
        "skyrl",
    ),
    "slime": Host(
        ">=0.3.1,<0.4",
        {"backends.megatron_utils.loss": "calculate_log_probs_and_entropy get_log_probs_and_entropy"},
        "slime",
    ),
    "swift": Host(
        ">=4.6,<4.7",
        {
            "rlhf_trainers.grpo_trainer": (
                "GRPOTrainer._get_logps_via_local_forward selective_log_softmax entropy_from_logits"
            ),
        },
        "ms-swift",
    ),
    "trl": Host(
        ">=1.16,<1.17",
        {
            "trainer.utils": "_ChunkedLogProbFunction _use_triton maybe_gather_lm_head_ctx",
            "trainer.grpo_trainer": "GRPOTrainer._generate_and_score_completions GRPOTrainer._compute_loss "
            "GRPOTrainer._get_per_token_logps_and_entropies",
        },
        "trl",
    ),
    "unsloth_zoo": Host(
        ">=2026.10.9,<2026.11", {"fused_losses.fused_linear": "fused_linear_logprobs"}, "unsloth-zoo"
    ),
    "verl": Host(
        ">=0.9,<0.10",
        {
            "trainer.ppo.core_algos": "POLICY_LOSS_REGISTRY",
            "utils.experimental.torch_functional": "FusedLinearForPPO.forward",
            "utils.kernel.linear_cross_entropy": "linear_cross_entropy",
        },
        "verl",
    ),
}


def private(library: str, module: str) -> Any:
    """Import a module of one of `HOSTS`.

    Raises:
        ImportError: the library is missing, of a version that is not known, or without one of the names.
    """
    versions, names, distribution = HOSTS[library]
    remedy = f"install '{distribution}{versions}', or a newer grpo-fast"
    try:
        version = getattr(importlib.import_module(library), "__version__", None)
        version = metadata.version(distribution) if version is None else version
    except ModuleNotFoundError as error:
        raise ImportError(f"{library} cannot be imported ({error}): {remedy}") from error
    from packaging.specifiers import SpecifierSet  # which every host brings

    if not SpecifierSet(versions).contains(version, prereleases=True):
        raise ImportError(f"{distribution} is version {version}, which this adapter does not know: {remedy}")
    try:
        found = importlib.import_module(f"{library}.{module}")
        attrgetter(*names[module].split())(found)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ImportError(f"{distribution} {version} lacks a name of {module} ({error}): {remedy}") from error
    return found
