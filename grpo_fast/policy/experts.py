"""Mixtures of experts: their tensors, their routers, and the load-balancing loss."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from grpo_fast.config.policy import ModelConfig
from grpo_fast.policy.layers import decoder_layers
from grpo_fast.policy.vision import model_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Names in transformers' configurations and models.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
_ROUTERS = {"gate", "router", "router_gate"}


def expert_count(architecture: PreTrainedConfig) -> int:
    """Return how many experts a layer's router chooses from; 0 for a dense model."""
    config = architecture.get_text_config()
    return next((count for name in _COUNTS if (count := getattr(config, name, None))), 0)


def chosen_count(architecture: PreTrainedConfig) -> int:
    """Return how many experts a token visits."""
    config = architecture.get_text_config()
    return next((n for name in _CHOSEN if (n := getattr(config, name, None))), expert_count(architecture))


def chosen_share(architecture: PreTrainedConfig) -> float:
    """Return the share of its experts that a token visits; 1 for a dense model."""
    count = expert_count(architecture)
    return chosen_count(architecture) / count if count else 1.0


def is_expert(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter belongs to routed experts or their adapters."""
    if "shared" in name or is_router(name):
        return False
    per_head = any(mark in name for mark in ("conv", "mamba"))  # a matrix for each head
    stacked = not per_head and parameter.ndim == 3 and min(parameter.shape[1:]) > 1
    return ".experts." in name or stacked


def is_router(name: str) -> bool:
    """Return whether a module, or a parameter of one, is a router."""
    return not _ROUTERS.isdisjoint(name.split("."))


def expert_blocks(model: Any) -> dict[int, Any]:
    """Return the modules with a router and experts in one tensor, by the number of their layer."""
    blocks = {}
    for number, layer in enumerate(decoder_layers(model.get_decoder())):
        for block in layer.modules():
            if isinstance(getattr(block, "experts", None), nn.Module) and number_of_experts(block):
                blocks[number] = block
    return blocks


def number_of_experts(block: Any) -> int:
    return next((weight.shape[0] for weight in block.experts.parameters() if weight.ndim == 3), 0)


def require_router(config: ModelConfig, architecture: PreTrainedConfig) -> None:
    """Raise ValueError if a key needs a router or a loss that the model does not have."""
    kind, loss = f"model_type = {architecture.model_type!r}", config.router_aux_loss
    key = "train_router = false" if loss is None else f"router_aux_loss = {loss}"
    if not expert_count(architecture) and (loss is not None or not config.train_router):
        raise ValueError(f"model.{key}: {kind} has no experts, so no router; leave it out")
    if loss is not None and not has_balance_loss(architecture):
        raise ValueError(f"model.{key}: transformers has no load-balancing loss for {kind}; leave it out")


def has_balance_loss(architecture: PreTrainedConfig) -> bool:
    """Return whether transformers has a load-balancing loss, and returns router logits, for this type."""
    kind = model_class(architecture)
    outputs = getattr(kind, "_can_record_outputs", None) or {}
    loss = getattr(sys.modules[kind.__module__], _BALANCE, None) if "router_logits" in outputs else None
    return loss is not None and "num_keys" not in inspect.signature(loss).parameters  # Doge's differs


def balance_loss(model: PreTrainedModel, routed: Sequence[Tensor]) -> Tensor:
    """Compute transformers' load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6).

    It is 1 per expert that a token visits if all are chosen equally often, and larger otherwise. `routed` has
    the router's logits (T, E) of each layer.
    """
    balance = getattr(sys.modules[type(model).__module__], _BALANCE)
    loss: Tensor = balance(tuple(routed), expert_count(model.config), chosen_count(model.config))
    return loss


_BALANCE = "load_balancing_loss_func"  # in the modules of transformers' models
