"""How a decoder layer is computed beside its products of matrices: by Liger's kernels, or compiled.

Norms, rotary embeddings, activations and residuals are each bound by memory, and fused they read it once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.recompute import decoder_layers, token_wise_mlps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIGER_TYPES = frozenset(
    ["gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"]
)
"""Types of models whose layers Liger computes as transformers does: a test holds each. Not OLMo 2, OLMo 3 and
GPT-OSS, whose norms it rounds once more, and no experts, whose kernels Triton's interpreter cannot run."""


def resolve_liger(config: ModelConfig, device: torch.device, model_type: str) -> bool:
    """Whether Liger's kernels compute the layers.

    Raises:
        ValueError: they are asked for on another device than a GPU, or for a type that Liger does not know.
        ImportError: they are asked for and liger-kernel is not installed.
    """
    on_gpu, installed = device.type == "cuda", find_spec("liger_kernel") is not None
    if config.liger_kernels == "auto":
        return on_gpu and installed and model_type in LIGER_TYPES
    if not config.liger_kernels:
        return False
    if not on_gpu:
        raise ValueError(f"model.liger_kernels = true needs a CUDA device, not {device.type}; give auto")
    if not installed:
        raise ImportError("model.liger_kernels = true needs liger-kernel: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    if model_type not in KNOWN:
        raise ValueError(f"model.liger_kernels = true: Liger has none for {model_type!r}; give auto")
    return True


def fuse_layers(model: PreTrainedModel, config: ModelConfig, device: torch.device) -> None:
    """Patch or compile decoder layers as configured, for the device that they will be on; a copy of a
    compiled model runs the layers of that."""
    liger = resolve_liger(config, device, model.config.model_type)
    if liger:
        # Layer kernels only: the loss never forms logits, so Liger's losses have nothing to replace.
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    wanted = config.compile
    if wanted == "auto":  # not of experts, which nobody has compiled on a GPU yet
        experts = any("expert" in name for name, _ in model.named_parameters())
        wanted = device.type == "cuda" and not liger and not experts
    if wanted:
        # Compiled by itself where it computes tiles, which end its layer's graph.
        for mlp in token_wise_mlps(model) if config.recomputed else ():
            mlp.forward = _compiled(mlp.forward)
        for layer in decoder_layers(model):
            layer.forward = _when_packed(layer.forward)


def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Rounded where uncompiled layers round: what is fused differs with and without gradients, and the
    log-probabilities of the two must not."""
    return torch.compile(plain, dynamic=True, options={"emulate_precision_casts": True})


def _when_packed(plain: Callable[..., Any]) -> Callable[..., Any]:
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
