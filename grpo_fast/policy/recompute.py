"""What a backward computes anew instead of keeping it: MLPs, over tiles of the tokens, or whole layers.

An MLP's activations are the widest of a layer, and a token's do not depend on other tokens: over tiles they
need the memory of one, however long the batch (TiledMLP of arXiv:2506.13996), and are computed no more often.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from grpo_fast.policy.layer_inputs import LayerInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TILE_TOKENS = 8192
"""Tokens that an MLP computes at one time. Arithmetic bounds its products of matrices from far fewer on, so
reading weights, converting 4-bit ones and adding up their gradients once a tile costs little."""

_MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp")  # as transformers' layers call them


def recompute(model: PreTrainedModel, what: Literal[True, "mlp", "offload"]) -> None:
    """Let the backward keep the inputs alone, of each layer's MLP ("mlp") or of each layer, on the host
    ("offload", see `LayerInputs`) or the device.

    Raises:
        ValueError: "mlp", and the layers have no MLP.
    """
    if what == "mlp":
        if not (mlps := _mlps(model)):
            raise ValueError(
                f"model.gradient_checkpointing = 'mlp': the layers of {type(model).__name__} have no MLP "
                f"of their own ({', '.join(_MLPS)}); set it to true or false"
            )
        for mlp in mlps:
            _replace_forward(mlp, _recomputed_in_tiles if _is_token_wise(mlp) else _recomputed)
        return
    tile_mlps(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if what == "offload":
        inputs = LayerInputs()
        for layer in decoder_layers(model):
            layer._gradient_checkpointing_func = inputs.checkpoint


def tile_mlps(model: nn.Module) -> None:
    """Compute MLPs over more tokens than a tile's in tiles, where they are token-wise."""
    for mlp in token_wise_mlps(model):
        _replace_forward(mlp, _in_tiles)


def token_wise_mlps(model: nn.Module) -> list[Any]:
    """The layers' MLPs that compute each token by itself; experts sort the tokens of all."""
    return [mlp for mlp in _mlps(model) if _is_token_wise(mlp)]


def decoder_layers(model: nn.Module) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _mlps(model: nn.Module) -> list[Any]:
    layers = decoder_layers(model)
    return [child for layer in layers for name, child in layer.named_children() if name in _MLPS]


def _is_token_wise(mlp: Any) -> bool:
    experts = any("expert" in name or weight.ndim > 2 for name, weight in mlp.named_parameters())
    return not experts and len(inspect.signature(mlp.forward).parameters) == 1


def _replace_forward(mlp: Any, forward: Callable[..., Any]) -> None:
    """By one function for all, or each layer would be compiled anew."""
    mlp.plain_forward, mlp.forward = mlp.forward, MethodType(forward, mlp)


def _recomputed(mlp: Any, *args: Any, **kwargs: Any) -> Any:
    """Without a backward to come it is plain: `checkpoint` asks for the random numbers' state even there."""
    if not torch.is_grad_enabled():
        return mlp.plain_forward(*args, **kwargs)
    return checkpoint(mlp.plain_forward, *args, use_reentrant=False, **kwargs)


@torch.compiler.disable
def _in_tiles(mlp: Any, hidden: Tensor) -> Tensor:
    """In a layer that is recomputed whole: one tile is kept then as all else of the layer is."""
    return mlp.plain_forward(hidden) if len(_tiles(hidden)) == 1 else _recomputed_in_tiles(mlp, hidden)


@torch.compiler.disable
def _recomputed_in_tiles(mlp: Any, hidden: Tensor) -> Tensor:
    """(B, T, H) -> (B, T, H); a backward has kept the input alone."""
    trained = hidden.requires_grad or any(weight.requires_grad for weight in mlp.parameters())
    if not (trained and torch.is_grad_enabled()):
        return _result(mlp, hidden)
    kept = _Input.apply(hidden if hidden.requires_grad else hidden.detach().requires_grad_(), mlp)
    return _Result.apply(kept, mlp)


class _Input(torch.autograd.Function):
    """Keeps an MLP's input, and makes of the result's gradient those of input and weights, whose hooks
    hear of it once a tile.

    A layer's recomputation ends where the last tensor is kept: before the MLP, which then runs for `backward`
    alone.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mlp: Any) -> Tensor:
        ctx.mlp, ctx.random = mlp, (torch.get_rng_state(), *get_device_states(hidden))
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (hidden,), (of_cpu, devices, of_devices) = ctx.saved_tensors, ctx.random
        found = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        with torch.random.fork_rng(devices), torch.enable_grad():  # dropout's numbers once more
            torch.set_rng_state(of_cpu)
            set_device_states(devices, of_devices)
            for tile, of_result, of_tile in zip(*map(_tiles, (hidden, gradient, found)), strict=True):
                leaf = tile.detach().requires_grad_()
                ctx.mlp.plain_forward(leaf).backward(of_result)
                of_tile.copy_(leaf.grad)
        return found, None


class _Result(torch.autograd.Function):
    """The MLP, computed without a graph: the gradient of its result goes to `_Input` as it is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mlp: Any) -> Tensor:
        return _result(mlp, hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _result(mlp: Any, hidden: Tensor) -> Tensor:
    results = [mlp.plain_forward(tile) for tile in _tiles(hidden.detach())]
    return (results[0] if len(results) == 1 else torch.cat(results, 1)).view(hidden.shape)


def _tiles(tensor: Tensor) -> list[Tensor]:
    """(B, T, H) as (1, TILE_TOKENS or fewer, H) each, all about as long; on the meta device as one."""
    tokens = tensor.reshape(-1, tensor.shape[-1])
    count = 1 if tensor.is_meta else max(1, -(-len(tokens) // TILE_TOKENS))
    return [tile[None] for tile in tokens.tensor_split(count)]  # with strides of their own: one graph
