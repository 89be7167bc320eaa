"""The private names of other trainers that adapters use: which versions have them, what is lost without."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Host:
    """A library whose trainers the room serves."""

    versions: str  # that the adapter was tested with
    lost: str  # without the adapter
    names: Mapping[str, tuple[str, ...]]  # by module of the library
    distribution: str = ""  # that pip installs; by default the name it is imported by, with hyphens


HOSTS = {
    "axolotl": Host(
        ">=0.21,<0.22",
        "Axolotl's GRPO trainers make whole logits",
        {
            "core.trainers.grpo.trainer": ("GRPOTrainer._full_logits_logps",),
            "core.trainers.grpo.async_trainer": (
                *("AsyncGRPOTrainer._get_per_token_logps_and_entropies",),
                *("AsyncGRPOTrainer._get_per_token_logps_flattened",),
                *("AsyncGRPOTrainer._get_per_token_logps_and_entropies_flattened",),
                *("selective_log_softmax", "entropy_from_logits", "_fused_selective_log_softmax"),
            ),
        },
    ),
    "nemo_rl": Host(
        ">=0.6,<0.8",
        "NeMo-RL trains on its own losses and chunked log-probabilities",
        {
            "algorithms.loss.interfaces": ("LossInputType.LOGPROB", "LossType"),
            "distributed.model_utils": ("from_parallel_hidden_states_to_logprobs",),
        },
    ),
    "openrlhf": Host(
        ">=0.11.2,<0.12",
        "OpenRLHF's actor makes whole logits, and its loss is its own",
        {
            "models.actor": (
                *("Actor.forward", "unpad_and_slice_tensor", "log_probs_from_logits", "compute_entropy"),
            ),
            "models.loss": ("PolicyLoss.forward",),
        },
    ),
    "prime_rl": Host(
        ">=0.8,<0.10",
        "prime-rl computes its own losses and its output layer in chunks",
        {
            "trainer.models.layers.lm_head": ("FusedOutputLinear.forward",),
            "trainer.models.layers.lm_head_gemma": ("GemmaFusedOutputLinear.forward",),
            "trainer.rl.loss": ("LossOutputs",),
        },
    ),
    "skyrl": Host(
        ">=0.4,<0.5",
        "SkyRL's workers make whole logits, and its losses are its own",
        {
            "backends.skyrl_train.workers.model_wrapper": (
                *("HFModelWrapper.forward", "logprobs_from_logits", "ulysses_pad_and_slice_inputs"),
            ),
            "backends.skyrl_train.utils.ppo_utils": ("PolicyLossRegistry", "apply_off_policy_correction"),
        },
    ),
    "slime": Host(
        ">=0.3.1,<0.4",
        "slime scores tokens from whole logits",
        {
            "backends.megatron_utils.loss": (
                *("calculate_log_probs_and_entropy", "get_log_probs_and_entropy"),
            )
        },
    ),
    "swift": Host(
        ">=4.6,<4.7",
        "ms-swift's GRPO trainer makes whole logits",
        {
            "rlhf_trainers.grpo_trainer": (
                *("GRPOTrainer._get_logps_via_local_forward", "selective_log_softmax", "entropy_from_logits"),
            ),
        },
        "ms-swift",
    ),
    "trl": Host(
        ">=1.16,<1.17",
        "TRL's trainers score tokens by their own head",
        {
            "trainer.utils": ("_ChunkedLogProbFunction", "_use_triton", "maybe_gather_lm_head_ctx"),
            "trainer.grpo_trainer": (
                "GRPOTrainer._generate_and_score_completions",
                "GRPOTrainer._get_per_token_logps_and_entropies",
                "GRPOTrainer._compute_loss",
            ),
        },
    ),
    "unsloth_zoo": Host(
        ">=2026.10.9,<2026.11",
        "Unsloth's trainers score tokens by their own kernel",
        {"fused_losses.fused_linear": ("fused_linear_logprobs",)},
    ),
    "verl": Host(
        ">=0.9,<0.10",
        "verl's fused kernels and policy losses are its own",
        {
            "trainer.ppo.core_algos": ("POLICY_LOSS_REGISTRY",),
            "utils.experimental.torch_functional": ("FusedLinearForPPO.forward",),
            "utils.kernel.linear_cross_entropy": ("linear_cross_entropy",),
        },
    ),
}


def private(library: str, module: str) -> Any:
    """A module of one of `HOSTS`, in which the private names stand that its adapter uses.

    Raises:
        ImportError: the library is missing, of a version that is not known, or without one of the names.
    """
    host = HOSTS[library]
    distribution = host.distribution or library.replace("_", "-")
    remedy = f"install '{distribution}{host.versions}', or a newer grpo-fast; until then {host.lost}"
    try:
        version = getattr(importlib.import_module(library), "__version__", None)
        version = metadata.version(distribution) if version is None else version
    except ModuleNotFoundError as error:
        raise ImportError(f"{library} cannot be imported ({error}): {remedy}") from error
    from packaging.specifiers import SpecifierSet  # which every host brings

    if not SpecifierSet(host.versions).contains(version, prereleases=True):
        raise ImportError(f"{distribution} is version {version}, which this adapter does not know: {remedy}")
    try:
        found = importlib.import_module(f"{library}.{module}")
        attrgetter(*host.names[module])(found)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ImportError(f"{distribution} {version} lacks a name of {module} ({error}): {remedy}") from error
    return found
