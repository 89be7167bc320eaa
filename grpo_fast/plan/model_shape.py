"""A model without its weights: its configuration, and its parts counted on the meta device.

Well-known models' configurations are kept here, for planning and benchmarks without a download.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from grpo_fast.plan.stand_ins import PLANNED_ATTENTION, register
from grpo_fast.policy.architecture import check_layer_types
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.gguf import PREFIX
from grpo_fast.policy.load import _add_lora, _disable_dropout, resolve_source

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

_QWEN2 = {"vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_QWEN3 = _QWEN2 | {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
_LLAMA3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **others,
    }


# name: (transformers' model type, what its published config.json says)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": (
        "llama",
        _sizes(576, 1536, 30, 9, tied=True, num_key_value_heads=3, vocab_size=49152, rope_theta=1e5),
    ),
    "Qwen2.5-0.5B": ("qwen2", _QWEN2 | _sizes(896, 4864, 24, 14, tied=True, num_key_value_heads=2)),
    "Qwen2.5-1.5B": ("qwen2", _QWEN2 | _sizes(1536, 8960, 28, 12, tied=True, num_key_value_heads=2)),
    "Qwen2.5-3B": ("qwen2", _QWEN2 | _sizes(2048, 11008, 36, 16, tied=True, num_key_value_heads=2)),
    "Qwen2.5-7B": (
        "qwen2",
        _QWEN2 | _sizes(3584, 18944, 28, 28, tied=False, num_key_value_heads=4, vocab_size=152064),
    ),
    "Qwen3-0.6B": ("qwen3", _QWEN3 | _sizes(1024, 3072, 28, 16, tied=True)),
    "Qwen3-1.7B": ("qwen3", _QWEN3 | _sizes(2048, 6144, 28, 16, tied=True)),
    "Qwen3-8B": ("qwen3", _QWEN3 | _sizes(4096, 12288, 36, 32, tied=False)),
    "Llama-3.2-1B": ("llama", _LLAMA3 | _sizes(2048, 8192, 16, 32, tied=True, head_dim=64)),
    "Llama-3.1-8B": ("llama", _LLAMA3 | _sizes(4096, 14336, 32, 32, tied=False)),
}


PARTS = ("embedding", "attention", "mlp", "experts", "norms", "head", "adapters", "other")
BLOCK_TOKENS = 16  # of one page of vLLM's KV cache


@dataclass(frozen=True)
class KvLayer:
    """Keys and values of one layer."""

    numbers: int  # of one token
    window: int | None = None  # tokens that a sliding window keeps; None: all


@dataclass(frozen=True)
class ModelShape:
    """What a model's bytes follow from. Parameters are counts, each tied tensor once."""

    parameters: dict[str, int]  # by name in PARTS; parts without any are left out
    bytes: int  # of all of them, in the dtypes they are kept in
    trainable: dict[torch.dtype, int]  # counts of what the optimiser changes, by dtype
    trainable_tensors: int
    head_trained: bool
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


def architecture(name: str) -> PretrainedConfig:
    """The configuration of a model in `SHAPES`, by name in any case.

    Raises:
        ValueError: it is not one of them; the message lists them.
    """
    from transformers import AutoConfig

    known = {shape.lower(): shape for shape in SHAPES}
    if name.lower() not in known:
        raise ValueError(f"model {name!r} is not a shape known here; known are {', '.join(SHAPES)}")
    model_type, sizes = SHAPES[known[name.lower()]]
    return AutoConfig.for_model(model_type, **sizes)


def model_config(source: str, *, revision: str | None = None) -> PretrainedConfig:
    """A model's configuration, without its weights and without running code of its own.

    Args:
        source: a folder or a `config.json` file, a name in `SHAPES`, a hub id, or `package:NAME`.
        revision: of the hub's repository.

    Raises:
        ValueError: none of these leads to a configuration.
    """
    from transformers import AutoConfig

    if source.startswith(PREFIX):
        source = resolve_source(source)
    if source.lower() in {shape.lower() for shape in SHAPES} and not Path(source).exists():
        return architecture(source)
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {source!r} has no configuration that can be read ({reason}); give a folder or a "
            f"config.json, a hub id that can be reached, or one of {', '.join(SHAPES)}"
        ) from error


def skeleton(config: PretrainedConfig, model: ModelConfig) -> PreTrainedModel | PeftModel:
    """The model on the meta device, its attention a stand-in.

    Raises:
        ValueError: LoRA modules that the model does not have, layers that cannot be packed, or experts with
            adapters or in another dtype than bfloat16.
    """
    register()
    found = random_model(config, model, attention=PLANNED_ATTENTION, device="meta")
    if not any("expert" in name for name, _ in found.named_parameters()):
        return found
    if model.dtype != "bfloat16":  # the only one whose shapes torch's grouped product knows
        raise ValueError(
            f"model.dtype = {model.dtype!r}: a mixture of experts can be planned in bfloat16 only"
        )
    if model.lora is not None:  # peft's adapters on experts run nowhere but on a real device
        raise ValueError("model.lora: adapters on a mixture of experts cannot be planned; leave them out")
    return found


def random_model(
    config: PretrainedConfig, model: ModelConfig, *, attention: str, device: torch.device | str
) -> PreTrainedModel | PeftModel:
    """A model with random weights, frozen, adapted and checkpointed as `load_policy` would.

    Raises:
        ValueError: LoRA modules that the model does not have, or layers that cannot be packed.
    """
    from transformers import AutoModelForCausalLM

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


def model_shape(model: PreTrainedModel | PeftModel) -> ModelShape:
    """Counts of a model that `skeleton` made."""
    from transformers import PreTrainedModel

    base = model if isinstance(model, PreTrainedModel) else cast(PreTrainedModel, model.get_base_model())
    config = base.config.get_text_config()
    head = base.get_output_embeddings()
    parameters: dict[str, int] = {}
    trainable: dict[torch.dtype, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(base, name, parameter)
        parameters[part] = parameters.get(part, 0) + parameter.numel()
        if parameter.requires_grad:
            trainable[parameter.dtype] = trainable.get(parameter.dtype, 0) + parameter.numel()
    rank = getattr(config, "kv_lora_rank", None)
    return ModelShape(
        parameters={part: parameters[part] for part in PARTS if part in parameters},
        bytes=sum(p.nbytes for p in model.parameters()),
        trainable=trainable,
        trainable_tensors=sum(p.requires_grad for p in model.parameters()),
        head_trained=head.weight.requires_grad,
        softcap=getattr(config, "final_logit_softcapping", None) is not None,
        vocabulary=head.weight.shape[0],
        hidden=head.weight.shape[1],
        heads=config.num_attention_heads,
        layers=_kv_layers(base),
        latent=None if rank is None else rank + config.qk_rope_head_dim,
        itemsize=head.weight.element_size(),
    )


def _part(base: PreTrainedModel, name: str, parameter: nn.Parameter) -> str:
    if "lora_" in name:
        return "adapters"
    if parameter is base.get_input_embeddings().weight:
        return "embedding"
    if any(parameter is own for own in base.get_output_embeddings().parameters()):
        return "head"
    module = name.lower().rpartition(".")[0]
    return next((part for part, marks in _MARKS.items() if any(mark in module for mark in marks)), "other")


# In this order: an expert lies within an MLP, and some attentions have norms of their own.
_MARKS = {
    "norms": ("norm", "ln_"),
    "experts": ("expert",),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
}


def _kv_layers(base: PreTrainedModel) -> tuple[KvLayer, ...]:
    """What transformers' own cache holds after one token, so that no architecture needs a formula."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=base.config)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")
    base.eval()  # checkpointing would drop the cache
    with torch.no_grad():
        base.base_model(
            input_ids=token, position_ids=token, attention_mask=seen, past_key_values=cache, use_cache=True
        )
    base.train()
    return tuple(
        KvLayer(
            layer.keys[..., :1, :].numel() + layer.values[..., :1, :].numel(),
            getattr(layer, "sliding_window", None),
        )
        for layer in cache.layers
    )


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The same architecture with its first layers only."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for name, values in _per_layer(text).items():
        setattr(text, name, values[:count])
    text.num_hidden_layers = count
    return changed


def layers_alike(config: PretrainedConfig) -> bool:
    """Whether nothing in the configuration tells one layer from another."""
    text = config.get_text_config()
    differing = [values for values in _per_layer(text).values() if len(set(map(str, values))) > 1]
    dense_ones = any(getattr(text, name, None) for name in ("first_k_dense_replace", "mlp_only_layers"))
    return not differing and not dense_ones and getattr(text, "decoder_sparse_step", 1) == 1


def _per_layer(text: PretrainedConfig) -> dict[str, Sequence[object]]:
    """Settings that are given for each layer."""
    count = text.num_hidden_layers
    return {k: v for k, v in vars(text).items() if isinstance(v, list | tuple) and len(v) == count}
