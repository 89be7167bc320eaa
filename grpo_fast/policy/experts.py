"""Mixtures of experts: which of a model's tensors are those of several experts, which are its routers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# As transformers' configurations and blocks of experts call them.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
_ROUTERS = {"gate", "router", "router_gate"}


def expert_count(architecture: PreTrainedConfig) -> int:
    """How many experts a layer's router chooses from; 0 of a dense model."""
    config = architecture.get_text_config()
    return next((count for name in _COUNTS if (count := getattr(config, name, None))), 0)


def chosen_share(architecture: PreTrainedConfig) -> float:
    """The share of its experts that a token visits; 1 of a dense model."""
    config, there = architecture.get_text_config(), expert_count(architecture)
    chosen = next((count for name in _CHOSEN if (count := getattr(config, name, None))), there)
    return chosen / there if there else 1.0


def is_expert(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is of experts that a router chooses: of one, of several in one tensor, or adapters
    of them."""
    if "shared" in name or is_router(name):
        return False
    return ".experts." in name or _is_stack(name, parameter)


def is_router(name: str) -> bool:
    """Whether a module, or a parameter of one, of a mixture of experts chooses between them."""
    return not _ROUTERS.isdisjoint(name.split("."))


def fused_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters (E, A, B) that hold a matrix of each expert, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if _is_stack(name, parameter)}


def _is_stack(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 3 and min(parameter.shape[1:]) > 1 and "conv" not in name
