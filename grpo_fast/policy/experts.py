"""Mixtures of experts: which of a model's tensors are experts', which their routers', and how even its choice
is."""

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

# As transformers' configurations and blocks of experts call them.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
_ROUTERS = {"gate", "router", "router_gate"}


def expert_count(architecture: PreTrainedConfig) -> int:
    """How many experts a layer's router chooses from; 0 of a dense model."""
    config = architecture.get_text_config()
    return next((count for name in _COUNTS if (count := getattr(config, name, None))), 0)


def chosen_count(architecture: PreTrainedConfig) -> int:
    """How many of them a token visits."""
    config = architecture.get_text_config()
    return next((n for name in _CHOSEN if (n := getattr(config, name, None))), expert_count(architecture))


def chosen_share(architecture: PreTrainedConfig) -> float:
    """The share of its experts that a token visits; 1 of a dense model."""
    there = expert_count(architecture)
    return chosen_count(architecture) / there if there else 1.0


def is_expert(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is of experts that a router chooses: of one, of several in one tensor, or adapters
    of them."""
    if "shared" in name or is_router(name):
        return False
    return ".experts." in name or _is_stack(name, parameter)


def is_router(name: str) -> bool:
    """Whether a module, or a parameter of one, of a mixture of experts chooses between them."""
    return not _ROUTERS.isdisjoint(name.split("."))


def _is_stack(name: str, parameter: Tensor) -> bool:
    of_heads = any(mark in name for mark in ("conv", "mamba"))  # a matrix for each head
    return not of_heads and parameter.ndim == 3 and min(parameter.shape[1:]) > 1


def expert_blocks(model: Any) -> dict[int, Any]:
    """By the number of its layer, the module in it that has a router and, in one tensor each, experts."""
    found = {}
    for number, layer in enumerate(decoder_layers(model.get_decoder())):
        for block in layer.modules():
            if isinstance(getattr(block, "experts", None), nn.Module) and number_of_experts(block):
                found[number] = block
    return found


def number_of_experts(block: Any) -> int:
    return next((weight.shape[0] for weight in block.experts.parameters() if weight.ndim == 3), 0)


def require_router(config: ModelConfig, architecture: PreTrainedConfig) -> None:
    """Raises ValueError where what is said of a router needs one that the model does not have."""
    said: dict[str, Any] = {} if config.train_router else {"train_router": False}
    if config.router_aux_loss is not None:
        said["router_aux_loss"] = config.router_aux_loss
    for name, value in said.items():
        given = f"model.{name} = {str(value).lower()}"
        if not expert_count(architecture):
            raise ValueError(
                f"{given}: model_type = {architecture.model_type!r} has no experts, so no router; leave it "
                "out"
            )
        if name == "router_aux_loss" and not has_balance_loss(architecture):
            raise ValueError(
                f"{given}: transformers has no load-balancing loss for model_type = "
                f"{architecture.model_type!r}, whose own training balances experts otherwise; leave it out"
            )


def has_balance_loss(architecture: PreTrainedConfig) -> bool:
    """Whether transformers has one for models of this type, and tells what their routers said."""
    kind = model_class(architecture)
    told = getattr(kind, "_can_record_outputs", None) or {}  # transformers' own name, without which none has
    loss = getattr(sys.modules[kind.__module__], _BALANCE, None) if "router_logits" in told else None
    return loss is not None and "num_keys" not in inspect.signature(loss).parameters  # as of Doge's experts


def balance_loss(model: PreTrainedModel, routed: Sequence[Tensor]) -> Tensor:
    """transformers' load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6): 1 per expert
    that a token visits where all are chosen alike, more where few are.

    Args:
        routed: (T, E) of each layer, the router's logits.
    """
    balance = getattr(sys.modules[type(model).__module__], _BALANCE)
    loss: Tensor = balance(tuple(routed), expert_count(model.config), chosen_count(model.config))
    return loss


_BALANCE = "load_balancing_loss_func"  # in the file of each type of model that has one
