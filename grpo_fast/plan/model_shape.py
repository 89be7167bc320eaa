"""A model without its weights: its configuration, and its parts counted on the meta device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from grpo_fast.config.policy import ModelConfig
from grpo_fast.plan.devices import TABLES
from grpo_fast.policy.adapters import expert_adapters
from grpo_fast.policy.architecture import backbone, check_architecture, logit_softcap, packing_obstacle
from grpo_fast.policy.attention import PRICED_ATTENTION, head_dims, register
from grpo_fast.policy.experts import chosen_share, is_expert, require_router
from grpo_fast.policy.layers import decoder_layers
from grpo_fast.policy.load import prepare_to_train, resolve_dtype
from grpo_fast.policy.optimizer import moment_bytes_8bit
from grpo_fast.policy.patches import Setting, apply_patches
from grpo_fast.policy.price import computed, price_layers
from grpo_fast.policy.quantization import cast_rest, count_numbers, is_quantized, loading_settings, quantizes
from grpo_fast.policy.source import PREFIX, resolve_source
from grpo_fast.policy.vision import auto_class

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

SHAPES: dict[str, tuple[str, dict[str, Any]]] = TABLES["models"]
"""name: (transformers' model type, what its published config.json says)"""

_CACHES = ("cache", "past_key_values", "cache_params", "state")  # how models call what they give back


# What a module's name says of its parameters, in this order: some attentions have norms of their own.
_MARKS = {
    "adapters": ("lora_",),
    "norms": ("norm", "ln_"),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
}
PARTS = ("embedding", "attention", "mlp", "experts", "norms", "head", "adapters", "other")


def model_config(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """A model's configuration, without its weights and, unless allowed, without running code of its own.

    Args:
        source: a folder or a `config.json` file, a name in `SHAPES`, a hub id, or `package:NAME`.
        revision: of the hub's repository.

    Raises:
        ValueError: none of these leads to a configuration.
    """
    from transformers import AutoConfig

    if source.startswith(PREFIX):
        source = resolve_source(source)
    for known, (model_type, sizes) in SHAPES.items():
        if source.lower() == known.lower() and not Path(source).exists():
            return AutoConfig.for_model(model_type, **sizes)
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {source!r} has no configuration that can be read ({reason}); give a folder or a "
            f"config.json, a hub id that can be reached, or one of {', '.join(SHAPES)}"
        ) from error


def skeleton(config: PretrainedConfig, model: ModelConfig) -> PreTrainedModel | PeftModel:
    """The model on the meta device, with `priced_attention`.

    Raises:
        ValueError: as `random_model`, or experts in another dtype than bfloat16.
        ImportError: as `random_model`.
    """
    register()
    attention = PRICED_ATTENTION if packing_obstacle(config) is None else None
    found = random_model(config, model, attention=attention, device="meta")
    if not any("expert" in name for name, _ in found.named_parameters()):
        return found
    if found.dtype != torch.bfloat16:  # the only one whose shapes torch's grouped product knows
        raise ValueError(
            f"model.dtype = {model.dtype!r}: a mixture of experts can be planned in bfloat16 only"
        )
    return found


def random_model(
    config: PretrainedConfig, model: ModelConfig, *, attention: str | None, device: torch.device | str
) -> PreTrainedModel | PeftModel:
    """A model with random weights, frozen, adapted and checkpointed as `load_policy` would.

    Raises:
        ValueError: no language model, LoRA modules that it does not have, or as `quantizes`.
        ImportError: 4 bits without bitsandbytes.
    """
    check_architecture(config)
    require_router(model, config)
    dtype = resolve_dtype(model.dtype, torch.device(device).type)
    model = model.model_copy(update={"dtype": dtype})
    with torch.device(device):
        found = auto_class(config).from_config(
            copy.deepcopy(config),
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            trust_remote_code=False,
        )
    if quantizes(model, config):
        settings = loading_settings(model, torch.device(device))
        found = _quantized(found, settings.get("quantization_config") or config.quantization_config, device)
    trained = prepare_to_train(found, model)
    if found.device.type != "meta":
        apply_patches(found, Setting(model, found.device))
    return trained


def _quantized(model: PreTrainedModel, settings: Any, device: torch.device | str) -> PreTrainedModel:
    """With random weights as transformers quantises them when it loads."""
    from bitsandbytes.functional import quantize_blockwise
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    quantize_blockwise(torch.zeros(1))  # with it comes a table for all others, which must have memory
    modules: Iterable[Any] = model.modules()
    for layer in modules:
        if isinstance(layer, Linear4bit):
            numbers = torch.empty(layer.weight.shape, dtype=model.dtype, device=device).normal_(std=0.02)
            layer.weight = Params4bit(numbers, **vars(layer.weight))._quantize(device)
            if layer.bias is not None:
                layer.bias = nn.Parameter(numbers.new_zeros(layer.bias.shape), requires_grad=False)
    return cast_rest(quantizer.postprocess_model(model), model.dtype)


@dataclass(frozen=True)
class KvLayer:
    """What a layer that attends caches of a sequence."""

    numbers: int  # keys and values of one token
    window: int | None  # tokens that a sliding window keeps; None: all


class ModelShape:
    """What a model's bytes follow from, counted of one that `skeleton` made.

    Parameters are counts, each tied tensor once.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        from transformers import PreTrainedModel

        from grpo_fast.rollout.decoder import reads_prompts_once

        base = model if isinstance(model, PreTrainedModel) else cast(PreTrainedModel, model.get_base_model())
        config = base.config.get_text_config()
        head: Any = base.get_output_embeddings().weight
        embedding: Any = base.get_input_embeddings().weight
        counts: Counter[str] = Counter()
        active: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            part, count = _part(base, name, parameter), count_numbers(parameter)
            counts[part] += count
            if part not in ("embedding", "head"):
                active[part] += int(count * chosen_share(config)) if is_expert(name, parameter) else count
        every = [*model.parameters()]
        trained = [p for p in every if p.requires_grad]
        sizes = [p.numel() for p in trained]
        quantized = [count_numbers(p) for p in every if is_quantized(p)]
        of_layers = [[*layer.parameters()] for layer in decoder_layers(base)]
        trained_in_layers = [[p.numel() for p in own if p.requires_grad] for own in of_layers]
        with _computable(base):
            cache = _cached(base)
            own = packing_obstacle(base.config) is not None
            # Bytes of a token in the layers, and where Liger's kernels or torch.compile compute them.
            self.plain, self.fused = (
                price_layers(base, backbone(base), fused=fused, own_attention=own) for fused in (False, True)
            )

        # By name in PARTS; parts without any are left out.
        self.parameters = {part: counts[part] for part in PARTS if part in counts}
        # Of them, those that a token passes through: without embedding, head and experts not chosen.
        self.active = sum(active.values())
        self.active_mlp = active["mlp"] + active["experts"]  # of these, in MLPs and experts
        self.bytes = sum(map(_nbytes, every))  # of all of them, in the dtypes they are kept in
        self.quantized = sum(quantized)  # parameters in 4 bits
        self.largest_quantized = max(quantized, default=0)  # which a product makes anew
        self.tensors, self.trainable_tensors = len(every), len(trained)
        self.trained = sum(sizes)
        # Of 16 bits, which have float32 masters; the others are their own.
        self.params_16bit = sum(p.numel() for p in trained if p.element_size() < 4)
        self.params_32bit = self.trained - self.params_16bit
        self.moments_8bit = sum(map(moment_bytes_8bit, sizes))
        self.largest = max(sizes, default=0)  # numbers of a trained tensor
        # Numbers of the three trained tensors in a row that are largest together.
        self.largest_three_adjacent = max((sum(sizes[i : i + 3]) for i in range(len(sizes))), default=0)
        self.layer = max((sum(map(_nbytes, own)) for own in of_layers), default=0)  # bytes of the largest
        self.layer_trained = max(map(sum, trained_in_layers), default=0)  # numbers of the largest layer
        self.layer_tensor = max((size for own in trained_in_layers for size in own), default=0)
        self.head_trained: bool = head.requires_grad
        self.embedding_trained: bool = embedding.requires_grad
        self.softcap = logit_softcap(config) is not None
        self.vocabulary, self.hidden = head.shape
        self.itemsize: int = head.element_size()  # bytes of one number of the model's dtype
        self.heads: int = getattr(config, "num_attention_heads", 0)  # of queries; Mamba has none
        self.head_dim = max(head_dims(config))
        # As transformers keeps keys and values, and bytes of the states of a sequence, however long it is.
        self.layers, self.states = _cached_parts(cache)
        self.shares_prefix = reads_prompts_once(base)  # in our own decoding
        paged = sum(layer.numbers for layer in self.layers)
        if latent := getattr(config, "kv_lora_rank", None):  # vLLM keeps multi-head latent attention as it is
            paged = len(self.layers) * (latent + config.qk_rope_head_dim)
        # In vLLM's pages, which layers with a window share with those without.
        self.paged_kv_bytes_per_token = self.itemsize * paged

    def moments(self, kind: str) -> int:
        """Bytes of Adam's moments with an optimizer of this kind."""
        return self.moments_8bit if kind == "adamw_8bit" else 8 * self.trained

    def inputs(self, tokens: int) -> int:
        """Bytes of all layers' inputs."""
        return self.itemsize * self.hidden * self.depth * tokens

    @property
    def depth(self) -> int:
        """Decoder layers, whatever each of them caches."""
        return len(self.plain.layers)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of one sequence in transformers' cache, exactly `tokens` long."""
        numbers = sum(layer.numbers * min(tokens, layer.window or tokens) for layer in self.layers)
        return self.itemsize * numbers + self.states


class Shapes:
    """Shapes of one architecture, trained in one way or several: each takes seconds, once."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self._made: dict[str, ModelShape] = {}

    def of(self, model: ModelConfig) -> ModelShape:
        """
        Raises:
            ValueError, ImportError: as `skeleton`.
        """
        model = model.model_copy(update={"gradient_checkpointing": False})  # which changes no counts
        key = model.model_dump_json(
            include={"dtype", "quantization", "lora", "train_lm_head", "train_router"}
        )
        if key not in self._made:
            self._made[key] = ModelShape(skeleton(self.config, model))
        return self._made[key]


@contextmanager
def _computable(model: nn.Module) -> Iterator[None]:
    """Without the sums of experts and their adapters, which peft cannot make on the meta device; experts
    keep what a gradient of these needs."""
    adapters = expert_adapters(model)
    for layer in adapters:
        layer.enable_adapters(False)
        layer.get_param().requires_grad_(True)
    try:
        yield
    finally:
        for layer in adapters:
            layer.enable_adapters(True)
            layer.get_param().requires_grad_(False)


def _nbytes(weight: Any) -> int:
    """Of a weight in 4 bits, with its scales and their own."""
    size: int = weight.nbytes
    if is_quantized(weight):
        states = filter(None, (weight.quant_state, weight.quant_state.state2))
        size += sum(t.nbytes for state in states for t in vars(state).values() if isinstance(t, Tensor))
    return size


def _part(base: PreTrainedModel, name: str, parameter: nn.Parameter) -> str:
    if parameter is base.get_input_embeddings().weight:
        return "embedding"
    if any(parameter is own for own in base.get_output_embeddings().parameters()):
        return "head"
    module = name.lower().rpartition(".")[0]
    if "lora_" not in module and is_expert(name, parameter):  # which lies within an MLP
        return "experts"
    return next((part for part, marks in _MARKS.items() if any(mark in module for mark in marks)), "other")


def _cached(base: PreTrainedModel) -> Any:
    """transformers' own cache after one token, so that no architecture needs a formula; None: it has none."""
    with torch.no_grad():
        own = packing_obstacle(base.config) is not None
        output = computed(backbone(base), 1, own_attention=own, use_cache=True)
    return next(filter(None, (getattr(output, name, None) for name in _CACHES)), None)


def _cached_parts(cache: Any) -> tuple[list[KvLayer], int]:
    """What is cached of one token in each layer that attends, and bytes of the states of all others."""
    found = [*_tensors_in(cache)]
    every = getattr(cache, "layers", ())
    attending = [
        layer for layer in every if getattr(layer, "keys", None) is not None and layer.keys.dim() > 1
    ]
    layers = [
        KvLayer(
            sum(part[..., :1, :].numel() for part in (layer.keys, layer.values)),
            getattr(layer, "sliding_window", None),
        )
        for layer in attending
    ]
    states = sum(map(_nbytes, found)) - sum(layer.keys.nbytes + layer.values.nbytes for layer in attending)
    return layers, states


def _tensors_in(held: Any) -> Iterator[Tensor]:
    """Those that a cache, or a part of one, holds; of one dimension are counters, and empty layers."""
    if isinstance(held, Tensor):
        yield from [held] if held.dim() > 1 else []
    elif isinstance(held, list | tuple | dict):
        for part in held.values() if isinstance(held, dict) else held:
            yield from _tensors_in(part)
    elif type(held).__name__.endswith(("Cache", "Layer")):
        yield from _tensors_in(vars(held))


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The same architecture with its first layers only."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:  # one for each layer
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return changed
