"""A model without its weights: on the meta device, prepared as for training, counted part by part."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from grpo_fast.plan.stand_ins import ATTENTION, register
from grpo_fast.policy.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PARTS = ("embedding", "attention", "mlp", "experts", "norms", "head", "adapters", "other")
BLOCK_TOKENS = 16  # of one page of vLLM's KV cache


@dataclass(frozen=True)
class KvLayer:
    """Keys and values of one layer."""

    numbers: int  # of one token
    window: int | None = None  # tokens that a sliding window keeps; none: all


@dataclass(frozen=True)
class ModelShape:
    """What a model's bytes follow from. Parameters are counts, each tied tensor once."""

    model_type: str
    parameters: dict[str, int]  # by name in PARTS; parts without any are left out
    bytes: int  # of all of them, in the dtypes they are kept in
    trainable: dict[torch.dtype, int]  # counts of what the optimiser changes, by dtype
    trainable_tensors: int
    tied: bool
    head_trained: bool
    head_bias: bool
    softcap: bool
    vocabulary: int
    hidden: int
    heads: int  # query heads
    layers: tuple[KvLayer, ...]  # as transformers keeps keys and values
    latent: int | None  # numbers of one token and layer as vLLM keeps multi-head latent attention
    itemsize: int  # bytes of one number of the model's dtype

    @property
    def total(self) -> int:
        """Parameters in all."""
        return sum(self.parameters.values())

    @property
    def narrow(self) -> int:
        """Trained parameters of 16 bits, which have float32 masters."""
        return sum(count for dtype, count in self.trainable.items() if dtype.itemsize < 4)

    @property
    def wide(self) -> int:
        """Trained parameters that are their own masters."""
        return sum(self.trainable.values()) - self.narrow

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of one sequence in transformers' cache, exactly `tokens` long."""
        return self.itemsize * sum(
            layer.numbers * min(tokens, layer.window or tokens) for layer in self.layers
        )

    @property
    def paged_kv_bytes_per_token(self) -> int:
        """Bytes of one token in vLLM's pages. Layers with a window share the pages of those without."""
        numbers = (layer.numbers if self.latent is None else self.latent for layer in self.layers)
        return self.itemsize * sum(numbers)

    def paged_kv_bytes(self, tokens: int) -> int:
        """Bytes of one sequence in vLLM's pages of BLOCK_TOKENS."""
        return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * self.paged_kv_bytes_per_token


def skeleton(config: PretrainedConfig, model: ModelConfig) -> nn.Module:
    """The model on the meta device, its attention a stand-in.

    Raises:
        ValueError: LoRA modules that the model does not have, layers that cannot be packed, or experts with
            adapters or in another dtype than bfloat16.
    """
    register()
    found = random_model(config, model, attention=ATTENTION, device="meta")
    if any("expert" in name for name, _ in found.named_parameters()):
        _check_experts(model)
    return found


def _check_experts(model: ModelConfig) -> None:
    """torch's grouped product knows the shapes of bfloat16 alone, and peft's adapters around it run nowhere
    but on a real device."""
    if model.dtype != "bfloat16":
        raise ValueError(
            f"model.dtype = {model.dtype!r}: a mixture of experts can be planned in bfloat16 only"
        )
    if model.lora is not None:
        raise ValueError("model.lora: adapters on a mixture of experts cannot be planned; leave them out")


def random_model(
    config: PretrainedConfig, model: ModelConfig, *, attention: str, device: torch.device | str
) -> nn.Module:
    """A model with random weights, frozen, adapted and checkpointed as `load_policy` would.

    Raises:
        ValueError: LoRA modules that the model does not have, or layers that cannot be packed.
    """
    from transformers import AutoModelForCausalLM

    from grpo_fast.policy.architecture import check_layer_types
    from grpo_fast.policy.load import _add_lora, _disable_dropout

    check_layer_types(config)
    with torch.device(device):
        found = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=getattr(torch, model.dtype),
            attn_implementation=attention,
            trust_remote_code=False,
        )
    _disable_dropout(found)
    if model.lora is not None:
        found = _add_lora(found, model.lora)
    elif not model.train_lm_head:
        found.get_output_embeddings().requires_grad_(False)
    if model.gradient_checkpointing:
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return found.train()


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside an adapted one."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def model_shape(model: nn.Module, layers: tuple[KvLayer, ...] | None = None) -> ModelShape:
    """Counts of a model that `skeleton` made.

    Args:
        layers: what `kv_layers` says of it, if known.
    """
    base = base_model(model)
    config = base.config.get_text_config()
    head = base.get_output_embeddings()
    parameters: dict[str, int] = {}
    trainable: dict[torch.dtype, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(base, name, parameter)
        parameters[part] = parameters.get(part, 0) + parameter.numel()
        if parameter.requires_grad:
            trainable[parameter.dtype] = trainable.get(parameter.dtype, 0) + parameter.numel()
    return ModelShape(
        model_type=config.model_type,
        parameters={part: parameters[part] for part in PARTS if part in parameters},
        bytes=sum(p.nbytes for p in model.parameters()),
        trainable=trainable,
        trainable_tensors=sum(p.requires_grad for p in model.parameters()),
        tied=head.weight is base.get_input_embeddings().weight,
        head_trained=head.weight.requires_grad,
        head_bias=head.bias is not None,
        softcap=getattr(config, "final_logit_softcapping", None) is not None,
        vocabulary=head.weight.shape[0],
        hidden=head.weight.shape[1],
        heads=config.num_attention_heads,
        layers=tuple(kv_layers(base)) if layers is None else layers,
        latent=_latent(config),
        itemsize=head.weight.element_size(),
    )


def _part(base: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if "lora_" in name:
        return "adapters"
    if parameter is base.get_input_embeddings().weight:
        return "embedding"
    if any(parameter is own for own in base.get_output_embeddings().parameters()):
        return "head"
    *modules, _ = name.lower().split(".")
    path = ".".join(modules)
    for part, marks in _MARKS.items():
        if any(mark in path for mark in marks):
            return part
    return "other"


# In this order: an expert lies within an MLP, and some attentions have norms of their own.
_MARKS: dict[Literal["norms", "experts", "attention", "mlp"], tuple[str, ...]] = {
    "norms": ("norm", "ln_"),
    "experts": ("expert",),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
}


def kv_layers(base: nn.Module) -> Iterator[KvLayer]:
    """What transformers' own cache holds after one token, so that no architecture needs a formula."""
    from transformers import DynamicCache

    cache = DynamicCache(config=base.config)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    training = base.training
    base.eval()  # checkpointing would drop the cache
    try:
        with torch.no_grad():
            base.base_model(
                input_ids=token,
                position_ids=token,
                past_key_values=cache,
                use_cache=True,
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta"),
            )
    finally:
        base.train(training)
    for layer in cache.layers:
        numbers = layer.keys[..., :1, :].numel() + layer.values[..., :1, :].numel()
        yield KvLayer(numbers, getattr(layer, "sliding_window", None))


def _latent(config: PretrainedConfig) -> int | None:
    rank = getattr(config, "kv_lora_rank", None)
    return None if rank is None else rank + config.qk_rope_head_dim
