"""Count a model without its weights, on the meta device."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from grpo_fast.config.paths import local_path
from grpo_fast.config.policy import ModelConfig, ReferenceConfig
from grpo_fast.plan.devices import TABLES
from grpo_fast.policy.adapters import expert_adapters
from grpo_fast.policy.architecture import backbone, check_architecture, packing_obstacle
from grpo_fast.policy.attention import has_sinks, head_dims
from grpo_fast.policy.experts import chosen_share, is_expert, require_router
from grpo_fast.policy.layers import decoder_layers, layer_mlps, token_wise_mlps
from grpo_fast.policy.load import prepare_to_train, resolve_dtype
from grpo_fast.policy.quantization import quantizes, unquantized
from grpo_fast.policy.source import PREFIX, resolve_source
from grpo_fast.policy.vision import auto_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SHAPES: dict[str, tuple[str, dict[str, Any]]] = TABLES["models"]
"""Model type and published configuration by name."""

# Coefficients of `LayerShape`: an MLP keeps its activation, experts gather and weigh their tokens, and a
# recurrent mixer in plain torch keeps its chunks in float32.
ACTIVATED, EXPERTS, RECURRENT = 1.2, 1.12, 5.0
# Bytes of a 4-bit value with its share of the scales, which may be quantized too.
DOUBLE_QUANTIZED, QUANTIZED = 0.516, 0.5625
# Bytes of both moments of a value; in 8 bits with a float32 scale for every 256.
ADAM_BYTES = {"adamw": 8.0, "adamw_offload": 8.0, "adamw_8bit": 2.04}


@dataclass(frozen=True)
class LayerShape:
    """The values that a decoder layer keeps of a token for the backward.

    A linear layer keeps its input and output. Counting a shared input for each projection stands for
    rotations, activation functions and residuals.
    """

    mixer: float  # everything but MLP and norms
    mlp: float
    norms: int  # width of all norms


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model. Parameters are counts, with each tied tensor once."""

    layers: tuple[LayerShape, ...]
    itemsize: int  # bytes of a value in the model's dtype
    parameters: int
    bytes: int  # of all parameters
    trained: int
    largest_three: int  # values of the largest three consecutive trained tensors
    layer_bytes: int  # of the largest layer
    quantized: int  # values of the largest 4-bit weight; 0: none
    adapters: int
    merged: tuple[int, ...]  # bytes of each layer's experts that adapters are added to
    vocabulary: int
    hidden: int
    queries: int  # width of the queries of one layer
    scoring_heads: int  # of attention that keeps the score of each pair of tokens; 0: none
    head_trained: bool
    packs: bool  # completions can share a prompt
    tiled: bool  # recomputed MLPs run in tiles
    experts: bool
    cache: tuple[tuple[int, int | None], ...]  # values per token and sliding window of each attention layer
    states: int  # values of the recurrent states of a sequence
    reference: int = 0  # bytes of another model as reference
    measured: float | None = None  # bytes that layers keep by `measured_shape`, in multiples of `kept`

    @property
    def master_bytes(self) -> int:
        """Return the bytes of float32 masters, which float32 weights do not have."""
        return 4 * self.trained if self.itemsize < 4 else 0

    def kept(self, layer: LayerShape, *, fused: bool) -> tuple[float, float]:
        """Return the bytes that a layer keeps of a token outside of its MLP, and in it.

        Unless `fused`, a norm keeps a float32 copy and, if its weight is trained, its result.
        """
        norms = layer.norms * (4 + self.itemsize * (not self.adapters))
        norms *= not (fused and self.measured is None)
        scale = 1.0 if self.measured is None else self.measured
        return scale * (self.itemsize * layer.mixer + norms), scale * self.itemsize * layer.mlp

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence in transformers' cache."""
        cached = sum(width * min(tokens, window or tokens) for width, window in self.cache)
        return self.itemsize * (cached + self.states)


def model_config(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return the configuration of a folder, a `config.json`, a name in `SHAPES`, a hub id or `package:NAME`.

    Raises:
        ValueError: none of these leads to a configuration.
    """
    from transformers import AutoConfig

    source = (
        resolve_source(source) if source.startswith(PREFIX) else str(local_path(source, "model") or source)
    )
    for known, (model_type, sizes) in SHAPES.items():
        if source.lower() == known.lower() and not Path(source).exists():
            return AutoConfig.for_model(model_type, **sizes)
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {source!r} has no readable configuration ({reason}); give a folder or a config.json, a "
            f"hub id that can be reached, or one of {', '.join(SHAPES)}"
        ) from error


def shape_of(model: ModelConfig, device: str, reference: ReferenceConfig | None = None) -> ModelShape:
    """Return the shape of a run's model on a kind of device, with the bytes of another model as reference.

    Raises as `model_config` and `model_shape`.
    """
    allowed = model.trust_remote_code
    config = model_config(model.path, revision=model.revision, trust_remote_code=allowed)
    shape = model_shape(config, model.model_copy(update={"dtype": resolve_dtype(model.dtype, device)}))
    if reference is None or reference.path is None:
        return shape
    return replace(shape, reference=shape_of(reference.model(model), device).bytes)


def random_model(
    config: PretrainedConfig, model: ModelConfig, *, attention: str | None, device: torch.device | str
) -> PreTrainedModel:
    """Return a model with random weights, without adapters and patches.

    Raises:
        ValueError: not a language model, or as `require_router`.
    """
    check_architecture(config)
    require_router(model, config)
    dtype = getattr(torch, resolve_dtype(model.dtype, torch.device(device).type))
    with torch.device(device):
        found: PreTrainedModel = auto_class(config).from_config(
            unquantized(config), dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return found


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """Return the same architecture with its first layers only."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:  # one value per layer
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return changed


def model_shape(config: PretrainedConfig, model: ModelConfig) -> ModelShape:
    """Count a model as it would be trained; `model.dtype` is not `auto`.

    Raises:
        ValueError: not a language model, unknown LoRA modules, a forward that fails on the meta device, or as
            `quantizes`.
        ImportError: 4 bits without bitsandbytes.
    """
    itemsize = getattr(torch, model.dtype).itemsize
    on_meta = model.model_copy(update={"dtype": "bfloat16"})  # the only dtype of experts there
    base = random_model(config, on_meta, attention=None, device="meta")
    cache, states = _cached(base)
    named = dict(prepare_to_train(base, model).named_parameters())
    text, head = base.config.get_text_config(), base.get_output_embeddings().weight
    quantized = _quantized(base, config) if quantizes(model, config) else {}

    def size(weight: Tensor) -> int:
        held = itemsize if weight.dtype == torch.bfloat16 else weight.itemsize
        return int(weight.numel() * quantized.get(weight, held))

    sizes = [weight.numel() for weight in named.values() if weight.requires_grad]
    layers = decoder_layers(base)
    heads, own_attention = getattr(text, "num_attention_heads", 0), packing_obstacle(config) is not None
    softcaps = getattr(text, "attn_logit_softcapping", None) is not None
    return ModelShape(
        layers=tuple(_layer(layer, text, model) for layer in layers),
        itemsize=itemsize,
        parameters=sum(weight.numel() for weight in named.values()),
        bytes=sum(map(size, named.values())),
        trained=sum(sizes),
        largest_three=max((sum(sizes[i : i + 3]) for i in range(len(sizes))), default=0),
        layer_bytes=max((sum(map(size, layer.parameters())) for layer in layers), default=0),
        quantized=max((weight.numel() for weight in quantized), default=0),
        adapters=sum(weight.numel() for name, weight in named.items() if "lora_" in name),
        merged=tuple(sum(size(one.get_param()) for one in expert_adapters(layer)) for layer in layers),
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        queries=heads * max(head_dims(text)),
        scoring_heads=heads if softcaps or (own_attention and has_sinks(config)) else 0,
        head_trained=head.requires_grad,
        packs=not own_attention and model.packing == "auto",
        tiled=bool(token_wise_mlps(base)),
        experts=any(is_expert(name, weight) for name, weight in base.named_parameters()),
        cache=cache,
        states=states,
    )


def _quantized(base: PreTrainedModel, config: PretrainedConfig) -> dict[Tensor, float]:
    saved = dict(getattr(config, "quantization_config", None) or {"bnb_4bit_use_double_quant": True})
    size = DOUBLE_QUANTIZED if saved.get("bnb_4bit_use_double_quant") else QUANTIZED
    head = base.get_output_embeddings()
    modules = [m for n, m in base.named_modules() if isinstance(m, nn.Linear) and "lora_" not in n]
    return {module.weight: size for module in modules if module is not head}


def _layer(layer: nn.Module, text: PretrainedConfig, model: ModelConfig) -> LayerShape:
    in_mlp = {part for mlp in layer_mlps(layer) for part in mlp.modules()}
    with_state = {part for mixer in layer.modules() if hasattr(mixer, "A_log") for part in mixer.modules()}
    dropout = model.lora is not None and model.lora.dropout > 0
    mixer = mlp = 0.0
    norms = 0
    for name, module in layer.named_modules():
        kept = 0.0
        if "lora_" in name:  # adapters of experts are merged before the forward
            if isinstance(module, nn.Linear) and ".lora_A" in name and ".experts." not in name:
                kept = module.out_features + dropout * module.in_features
        elif isinstance(module, nn.Linear):
            kept = module.in_features + module.out_features
            if is_expert(f".{name}.weight", module.weight):
                kept *= EXPERTS * chosen_share(text)
        elif "RMSNorm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            norms += cast(Tensor, module.weight).numel() * _norm_heads(name, module, text)
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3 and is_expert(f".{name}.", parameter):
                kept += EXPERTS * chosen_share(text) * len(parameter) * sum(parameter.shape[1:])
        kept *= RECURRENT if module in with_state else 1
        mixer, mlp = (mixer, mlp + kept) if module in in_mlp else (mixer + kept, mlp)
    return LayerShape(mixer, ACTIVATED * mlp, norms)


def _norm_heads(name: str, norm: Any, text: PretrainedConfig) -> int:
    """Return how often a norm is applied to a token: a norm of queries or keys, to each head."""
    if norm.weight.numel() not in head_dims(text) or norm.weight.numel() == text.hidden_size:
        return 1
    of_keys = name.rpartition(".")[2].startswith("k")
    return text.num_key_value_heads if of_keys else text.num_attention_heads


def _cached(base: PreTrainedModel) -> tuple[tuple[tuple[int, int | None], ...], int]:
    """Return `ModelShape.cache` and `ModelShape.states` from transformers' cache of one token.

    Raises:
        ValueError: the forward fails on the meta device.
    """
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    mask = torch.ones(1, 1, dtype=torch.bool, device="meta")
    for given in ({"position_ids": ids, "attention_mask": mask[None, None]}, {"attention_mask": mask}, {}):
        try:
            with torch.no_grad():
                output = backbone(base)(input_ids=ids, use_cache=True, **given)
            break
        except Exception as failure:
            problem = str(failure).strip().splitlines()[0]
    else:
        raise ValueError(
            f"{type(base).__name__} cannot be planned, as its forward fails on the meta device ({problem}); "
            "set rollout.num_generations and micro_batch_tokens"
        )
    layers = getattr(getattr(output, "past_key_values", None), "layers", ())
    has_keys = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    attending = [layer for layer in has_keys if layer.keys.dim() > 1]
    sizes = [layer.keys.numel() + layer.values.numel() for layer in attending]  # of one token
    windows = [getattr(layer, "sliding_window", None) for layer in attending]
    parts = tree_leaves([vars(layer) for layer in layers])
    total = sum(part.numel() for part in parts if isinstance(part, Tensor) and part.dim() > 1)
    return tuple(zip(sizes, windows, strict=True)), total - sum(sizes)
