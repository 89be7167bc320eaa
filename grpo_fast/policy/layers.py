"""Run decoder layers with checkpointing, MLPs in tiles (arXiv:2506.13996), Liger or torch.compile."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from grpo_fast.config.policy import ModelConfig
from grpo_fast.policy.vision import language_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

TILE_TOKENS = 8192
"""Tokens of an MLP's tile: enough that reading, dequantizing and accumulating its weights costs little."""

# Names in transformers' layers.
_MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp", "mlp_block")

LIGER_TYPES = frozenset(
    ["gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"]
)
"""Model types for which Liger's layers match transformers', each tested. In OLMo 2, OLMo 3 and GPT-OSS Liger
rounds norms once more, and Triton's interpreter cannot run its kernels for experts."""


def wrap_forward(module: Any, around: Callable[..., Any]) -> None:
    """Replace the module's forward by `around(module, original_forward, ...)`."""
    module.forward = partial(around, module, module.forward)


def recompute(model: PreTrainedModel, what: Literal[True, "mlp", "offload"]) -> None:
    """Checkpoint each layer's MLP ("mlp") or each layer, with inputs in host memory for "offload".

    transformers checkpoints layers only in training mode, which a policy is never in. ValueError if the model
    has no layers or MLPs that transformers names.
    """
    modules = _mlps(model) if what == "mlp" else decoder_layers(model)
    if not modules:
        problem = "no layers that transformers itself implements; set it to false"
        if what == "mlp":
            problem = f"no MLP named {', '.join(_MLPS)} in its layers; set it to true or false"
        raise ValueError(f"model.gradient_checkpointing = {what!r}: {type(model).__name__} has {problem}")
    tiled = token_wise_mlps(model) if what == "mlp" else []
    for module in modules:
        if module not in tiled:
            wrap_forward(module, _recomputed_from_host if what == "offload" else _recomputed)


def tile_mlps(model: nn.Module, *, always: bool = False) -> None:
    """Compute token-wise MLPs in tiles of `TILE_TOKENS`; `always`: checkpoint shorter ones, too."""
    if find_spec("liger_kernel") is None:
        logger.warning(
            "MLPs are not computed in tiles of %d tokens, which takes more memory for long sequences: "
            "pip install liger-kernel",
            TILE_TOKENS,
        )
    for mlp in token_wise_mlps(model):
        wrap_forward(mlp, partial(_in_tiles, always))


def decoder_layers(model: nn.Module) -> list[Any]:
    """Return the layers of the language model, without those of a vision tower."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = language_model(model).modules()
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def layer_mlps(layer: nn.Module) -> list[Any]:
    return [child for name, child in layer.named_children() if name in _MLPS]


def _mlps(model: nn.Module) -> list[Any]:
    return [mlp for layer in decoder_layers(model) for mlp in layer_mlps(layer)]


def token_wise_mlps(model: nn.Module) -> list[Any]:
    """Return the MLPs that Liger can compute in tiles, without experts and active dropout.

    Experts sort the tokens of all tiles, and a tile's recomputation does not repeat dropout's random numbers.
    """
    if find_spec("liger_kernel") is None:
        return []
    return [mlp for mlp in _mlps(model) if _is_token_wise(mlp)]


def _is_token_wise(mlp: Any) -> bool:
    if any("expert" in name or weight.ndim > 2 for name, weight in mlp.named_parameters()):
        return False
    if any(isinstance(part, nn.Dropout) and part.p and part.training for part in mlp.modules()):
        return False  # LoRA's
    return len(inspect.signature(type(mlp).forward).parameters) == 2  # with self


def _recomputed(module: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # `checkpoint` would save the random state
        return original_forward(*args, **kwargs)
    return checkpoint(original_forward, *args, use_reentrant=False, **kwargs)


def _recomputed_from_host(layer: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # `checkpoint` saves positional tensors, here the layer's input.
    forward = partial(original_forward, **kwargs)
    with save_on_cpu(pin_memory=args[0].is_cuda):
        return _recomputed(layer, forward, *args)


@torch.compiler.disable
def _in_tiles(always: bool, mlp: Any, original_forward: Callable[..., Any], hidden: Tensor) -> Tensor:
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    tiles = -(-hidden[..., 0].numel() // TILE_TOKENS)
    if not always and tiles <= 1:
        return original_forward(hidden)
    # Liger's function prepares a backward only if its input requires grad.
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in mlp.parameters()):
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()

    def tile(_: Any, part: Tensor) -> Tensor:
        output: Tensor = original_forward(part.reshape(1, -1, part.shape[-1]))
        return output.view_as(part)

    return apply_tiled_mlp(tile, mlp, hidden, num_shards=tiles)


def resolve_liger(config: ModelConfig, device: torch.device, model_type: str) -> bool:
    """Return whether Liger computes the layers; ValueError or ImportError if true cannot be."""
    on_gpu, installed = device.type == "cuda", find_spec("liger_kernel") is not None
    if config.liger_kernels is not True:
        return config.liger_kernels == "auto" and on_gpu and installed and model_type in LIGER_TYPES
    if not on_gpu:
        raise ValueError(f"model.liger_kernels = true needs a CUDA device, not {device.type}; give auto")
    if not installed:
        raise ImportError("model.liger_kernels = true needs liger-kernel: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    if model_type not in KNOWN:
        raise ValueError(f"model.liger_kernels = true: Liger has none for {model_type!r}; give auto")
    return True


def use_liger(model: PreTrainedModel) -> None:
    """Replace layers by Liger's, but not the loss."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def resolve_compile(config: ModelConfig, device: torch.device, *, liger: bool, plain: bool) -> bool:
    """Return whether torch compiles the layers; "auto" leaves out layers with experts or a state."""
    if config.compile == "auto":
        return device.type == "cuda" and not liger and plain
    return config.compile


def compile_layers(model: PreTrainedModel, config: ModelConfig) -> None:
    """Compile decoder layers. A copy of a compiled model runs the original's layers: make copies first."""
    if config.recomputed:  # tiles break their layer's graph, so compile a tiled MLP by itself
        for mlp in token_wise_mlps(model):
            mlp.forward = _compiled(mlp.forward)
    for layer in decoder_layers(model):
        layer.forward = _compiled_when_packed(layer.forward)


def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    # Fusion differs with and without gradients; rounding as uncompiled layers keeps log-probabilities equal.
    return torch.compile(plain, dynamic=True, options={"emulate_precision_casts": True})


def _compiled_when_packed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer for packed batches only: with a cache every length would be another graph."""
    compiled = _compiled(plain)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("packed_layout") is not None:
            return compiled(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):  # of the MLP, too
            return plain(*args, **kwargs)

    return forward
