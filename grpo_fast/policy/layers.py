"""How decoder layers run: what a backward recomputes instead of keeping, and by which kernels.

An MLP's activations are the widest of a layer, and a token's do not depend on other tokens: over tiles they
need the memory of one, however long the batch (TiledMLP of arXiv:2506.13996), and are computed no more often.
Norms, rotary embeddings, activations and residuals are each bound by memory: fused, by Liger's kernels or by
torch.compile, they read it once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from grpo_fast.config.policy import ModelConfig
from grpo_fast.policy.host_memory import LayerInputs
from grpo_fast.policy.vision import language_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def recompute(model: PreTrainedModel, what: Literal[True, "mlp", "offload"]) -> None:
    """Let the backward keep the inputs alone, of each layer's MLP ("mlp") or of each layer, on the host
    ("offload", see `LayerInputs`) or the device.

    transformers recomputes layers in training mode alone, which a policy is never in.

    Raises:
        ValueError: "mlp", and the layers have no MLP; or the model has no layers that transformers knows.
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
    if not (layers := decoder_layers(model)):
        raise ValueError(
            f"model.gradient_checkpointing = {what!r} finds no layers in {type(model).__name__} to "
            "recompute; set it to false, or give a model that transformers itself implements"
        )
    tile_mlps(model)
    forward = partial(_inputs_on_host, LayerInputs()) if what == "offload" else _recomputed
    for layer in layers:
        _replace_forward(layer, forward)


def tile_mlps(model: nn.Module) -> None:
    """Compute token-wise MLPs over more tokens than a tile's in tiles."""
    for mlp in token_wise_mlps(model):
        _replace_forward(mlp, _in_tiles)


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
    """The layers' MLPs that compute each token by itself; experts sort the tokens of all."""
    return [mlp for mlp in _mlps(model) if _is_token_wise(mlp)]


def _is_token_wise(mlp: Any) -> bool:
    experts = any("expert" in name or weight.ndim > 2 for name, weight in mlp.named_parameters())
    return not experts and len(inspect.signature(mlp.forward).parameters) == 1


def _replace_forward(module: Any, forward: Callable[..., Any]) -> None:
    """By one function for all, or each layer would be compiled anew."""
    module.plain_forward, module.forward = module.forward, MethodType(forward, module)


def _recomputed(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Without a backward to come it is plain: `checkpoint` asks for the random numbers' state even there."""
    if not torch.is_grad_enabled():
        return module.plain_forward(*args, **kwargs)
    return checkpoint(module.plain_forward, *args, use_reentrant=False, **kwargs)


def _inputs_on_host(inputs: LayerInputs, layer: Any, *args: Any, **kwargs: Any) -> Any:
    return inputs.checkpoint(partial(layer.plain_forward, **kwargs), *args)


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
    """(B, T, H) as (1, TILE_TOKENS or fewer, H) each, all about as long."""
    tokens = tensor.reshape(-1, tensor.shape[-1])
    count = max(1, -(-len(tokens) // TILE_TOKENS))
    return [tile[None] for tile in tokens.tensor_split(count)]  # with strides of their own: one graph


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


def resolve_compile(config: ModelConfig, device: torch.device, *, liger: bool, plain: bool) -> bool:
    """Whether torch compiles the layers; those with experts or a state, which are not `plain`, by request
    alone: nobody has on a GPU yet."""
    if config.compile == "auto":
        return device.type == "cuda" and not liger and plain
    return config.compile


def fuse_layers(model: PreTrainedModel, config: ModelConfig, device: torch.device) -> None:
    """Patch or compile decoder layers as configured, for the device that they will be on.

    A copy of a compiled model runs the layers of the original: make copies first.
    """
    liger = resolve_liger(config, device, model.config.model_type)
    if liger:  # layer kernels only: the loss never forms logits, so Liger's losses have nothing to replace
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    experts = any("expert" in name for name, _ in model.named_parameters())
    recurrent = any(hasattr(layer, "mixers") for layer in decoder_layers(model))  # see `fork_states`
    if not resolve_compile(config, device, liger=liger, plain=not (experts or recurrent)):
        return
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
    """A layer compiled for packed batches of any length; all layers of one kind share their graphs.

    Attention breaks the graph: it is fused by itself. With a cache of keys and values every length would be
    another graph, so generation computes the layer as it is.
    """
    compiled = _compiled(plain)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("packed_layout") is not None:
            return compiled(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):  # of the MLP, too
            return plain(*args, **kwargs)

    return forward
