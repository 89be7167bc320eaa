"""How decoder layers run: recomputed, MLPs in tiles (arXiv:2506.13996), by Liger or by torch.compile."""

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
"""Tokens that an MLP computes at one time. Arithmetic bounds its products of matrices from far fewer on, so
reading weights, converting 4-bit ones and adding up their gradients once a tile costs little."""

# As transformers' layers call them.
_MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp", "mlp_block")

LIGER_TYPES = frozenset(
    ["gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"]
)
"""Types of models whose layers Liger computes as transformers does: a test holds each. Not OLMo 2, OLMo 3 and
GPT-OSS, whose norms it rounds once more, and no experts, whose kernels Triton's interpreter cannot run."""


def wrap_forward(module: Any, around: Callable[..., Any]) -> None:
    """Call `around(module, original_forward, ...)` in place of the module's forward."""
    module.forward = partial(around, module, module.forward)


def recompute(model: PreTrainedModel, what: Literal[True, "mlp", "offload"]) -> None:
    """Let the backward keep only the inputs of each layer's MLP ("mlp") or of each layer.

    The inputs of layers stay on the device, or wait in the host's memory ("offload"). transformers recomputes
    layers only in training mode, which a policy is never in.

    Raises:
        ValueError: "mlp", and the layers have no MLP; or the model has no layers that transformers knows.
    """
    found = _mlps(model) if what == "mlp" else decoder_layers(model)
    if not found:
        problem = f"model.gradient_checkpointing = {what!r}: {type(model).__name__} has "
        if what == "mlp":
            raise ValueError(
                f"{problem}no MLP named {', '.join(_MLPS)} in its layers; set it to true or false"
            )
        raise ValueError(f"{problem}no layers that transformers itself implements; set it to false")
    tiled = token_wise_mlps(model) if what == "mlp" else []
    for module in found:
        if module not in tiled:
            wrap_forward(module, _recomputed_from_host if what == "offload" else _recomputed)


def tile_mlps(model: nn.Module, *, always: bool = False) -> None:
    """Compute token-wise MLPs over more tokens than a tile's in tiles, which a backward recomputes.

    Args:
        always: recompute MLPs over fewer tokens, too.
    """
    if find_spec("liger_kernel") is None:
        logger.warning(
            "MLPs are computed whole, and not in tiles of %d tokens, which takes more memory for long "
            "sequences: pip install liger-kernel",
            TILE_TOKENS,
        )
    for mlp in token_wise_mlps(model):
        wrap_forward(mlp, partial(_in_tiles, always))


def decoder_layers(model: nn.Module) -> list[Any]:
    """Of the language model: those of a vision tower are not among them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = language_model(model).modules()
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def layer_mlps(layer: nn.Module) -> list[Any]:
    return [child for name, child in layer.named_children() if name in _MLPS]


def _mlps(model: nn.Module) -> list[Any]:
    return [mlp for layer in decoder_layers(model) for mlp in layer_mlps(layer)]


def token_wise_mlps(model: nn.Module) -> list[Any]:
    """Return the MLPs that Liger can compute in tiles.

    Experts sort the tokens of all tiles, and tiles do not repeat the random numbers of a dropout.
    """
    if find_spec("liger_kernel") is None:
        return []
    return [mlp for mlp in _mlps(model) if _is_token_wise(mlp) and not _drops_out(mlp)]


def _is_token_wise(mlp: Any) -> bool:
    experts = any("expert" in name or weight.ndim > 2 for name, weight in mlp.named_parameters())
    return not experts and len(inspect.signature(type(mlp).forward).parameters) == 2  # with self


def _drops_out(mlp: nn.Module) -> bool:
    """Whether LoRA's dropout is on; a policy's other dropouts are off."""
    return any(isinstance(part, nn.Dropout) and part.p and part.training for part in mlp.modules())


def _recomputed(module: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Without a backward to come it is plain: `checkpoint` asks for the random numbers' state even there."""
    if not torch.is_grad_enabled():
        return original_forward(*args, **kwargs)
    return checkpoint(original_forward, *args, use_reentrant=False, **kwargs)


def _recomputed_from_host(layer: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Of what `checkpoint` keeps, positional tensors go to the host: the layer's input."""
    forward = partial(original_forward, **kwargs)
    with save_on_cpu(pin_memory=args[0].is_cuda):
        return _recomputed(layer, forward, *args)


@torch.compiler.disable
def _in_tiles(always: bool, mlp: Any, original_forward: Callable[..., Any], hidden: Tensor) -> Tensor:
    """(B, T, H) -> (B, T, H)."""
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    tiles = -(-hidden[..., 0].numel() // TILE_TOKENS)
    if not always and tiles <= 1:
        return original_forward(hidden)
    # Only by its input does Liger's function know that a backward comes.
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in mlp.parameters()):
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()

    def tile(_: Any, part: Tensor) -> Tensor:
        found: Tensor = original_forward(part.reshape(1, -1, part.shape[-1]))
        return found.view_as(part)

    return apply_tiled_mlp(tile, mlp, hidden, num_shards=tiles)


def resolve_liger(config: ModelConfig, device: torch.device, model_type: str) -> bool:
    """Whether Liger's kernels compute the layers.

    Raises:
        ValueError: they are asked for on another device than a GPU, or for a type that Liger does not know.
        ImportError: they are asked for and liger-kernel is not installed.
    """
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
    """Let Liger's kernels compute layers, but no loss: ours never forms logits."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def resolve_compile(config: ModelConfig, device: torch.device, *, liger: bool, plain: bool) -> bool:
    """Whether torch compiles the layers; those with experts or a state, which are not `plain`, by request
    alone: nobody has on a GPU yet."""
    if config.compile == "auto":
        return device.type == "cuda" and not liger and plain
    return config.compile


def compile_layers(model: PreTrainedModel, config: ModelConfig) -> None:
    """Compile decoder layers. A copy of a compiled model runs the original's layers: make copies first."""
    if config.recomputed:  # tiles end their layer's graph, so an MLP in tiles is compiled by itself
        for mlp in token_wise_mlps(model):
            mlp.forward = _compiled(mlp.forward)
    for layer in decoder_layers(model):
        layer.forward = _compiled_when_packed(layer.forward)


def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Rounded where uncompiled layers round: what is fused differs with and without gradients, and the
    log-probabilities of the two must not."""
    return torch.compile(plain, dynamic=True, options={"emulate_precision_casts": True})


def _compiled_when_packed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer for packed batches of any length; with a cache every length would be another graph."""
    compiled = _compiled(plain)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("packed_layout") is not None:
            return compiled(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):  # of the MLP, too
            return plain(*args, **kwargs)

    return forward
