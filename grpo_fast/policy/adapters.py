"""Low-rank adapters by peft: add them, and merge them into weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from torch import Tensor, nn
from torch.func import functional_call

from grpo_fast.config.patterns import TEXT_LIMIT, Pattern
from grpo_fast.config.policy import LoraConfig
from grpo_fast.distributed.shards import whole
from grpo_fast.policy.experts import is_expert, is_router
from grpo_fast.policy.quantization import dequantized
from grpo_fast.policy.vision import language_model, sees_images

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_OUTSIDE_LANGUAGE_MODEL = r"(?!.*\blanguage_model\.).*"  # module names, for peft
_ROUTERS = Version("5.13")  # the transformers whose routers read their weights through the adapter
_BASE = ".base_layer"  # in the name of a wrapped layer


def add_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Return the model with peft's adapters, in the model's dtype, or raise ValueError for wrong targets.

    In addition to the head, `all-linear` leaves out routers, weights that layers share, and weights that
    Mamba's kernels read. float32 adapters would keep a float32 copy of their input for the backward.
    """
    import peft
    from transformers import __version__

    given = f"model.lora.target_modules = {config.target_modules!r}"
    if config.target_parameters:
        given += f", model.lora.target_parameters = {config.target_parameters}"
    shared = _shared(model)
    excluded = [] if language_model(model) is model else [_OUTSIDE_LANGUAGE_MODEL]
    all_linear = str(config.target_modules).lower() == "all-linear"
    if all_linear:
        routers = {name for name, _ in model.named_modules() if is_router(name)}
        excluded += map(re.escape, sorted(shared | _read_by_kernels(model) | routers))
    targets = config.target_modules
    if isinstance(targets, str) and not all_linear:
        targets = _matched(given, targets, model)
    alpha: Any = config.alpha  # peft annotates an int, and computes with any number
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        target_parameters=config.target_parameters,
        exclude_modules="|".join(excluded) or None,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from error
    if targets is not config.target_modules:
        lora.target_modules = config.target_modules  # for the saved adapter
    settings: Any = model.config if sees_images(model.config) else model.config.get_text_config()
    tied = getattr(settings, "tie_word_embeddings", False)
    weights = ((base_name(name), weight) for name, weight in model.named_parameters())
    experts = {name for name, weight in weights if is_expert(name, weight) and not name.endswith("bias")}
    if all_linear and experts.isdisjoint(name for name, _ in adapted_weights(model)) and experts:
        names = sorted({re.sub(r".*\.\d+\.", "", name) for name in experts})
        logger.warning("%s adapts no experts; model.lora.target_parameters = %s would", given, names)
    tables = [model.get_output_embeddings(), *([model.get_input_embeddings()] if tied else [])]
    if any(isinstance(table, peft.tuners.lora.LoraLayer) for table in tables):
        raise ValueError(f"{given} reaches the output head; leave out the head and an embedding tied to it")
    if Version(__version__) < _ROUTERS and any(map(_reads_router, model.modules())):
        raise ValueError(
            f"{given} reaches a router, whose weight or bias transformers {__version__} reads past its "
            f"adapter; list target_modules without 'gate', or install transformers {_ROUTERS} or newer"
        )
    wrapped = {name for name, part in model.named_modules() if isinstance(part, peft.tuners.lora.LoraLayer)}
    if of_several := sorted(shared & wrapped):
        problem = f"reaches {of_several[0]}, whose weight several layers share"
        raise ValueError(f"{given} {problem}; leave it out, or set all-linear")
    return adapted


def _reads_router(block: nn.Module) -> bool:
    """Return whether an older transformers reads a weight of the block's router past its adapter."""
    base = getattr(getattr(block, "gate", None), "base_layer", None)
    of_deepseek_v2 = isinstance(base, nn.Linear) and hasattr(block, "topk_method")
    return of_deepseek_v2 or hasattr(base, "e_score_correction_bias")


def _matched(given: str, text: str, model: nn.Module) -> str:
    """Return a pattern of the modules that a user's pattern matches in bounded time, or raise ValueError."""
    try:
        pattern = Pattern(text)
        names = [name for name, _ in model.named_modules() if pattern.fullmatch(name)]
    except TimeoutError:
        problem = f"takes longer than {TEXT_LIMIT:g} s to match a module's name: list the names instead"
        raise ValueError(f"{given}: {problem}") from None
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None
    if not names:
        raise ValueError(f"{given} matches the whole name of no module; write it as .*\\.(q_proj|v_proj)")
    return "|".join(map(re.escape, names))


def _shared(model: PreTrainedModel) -> set[str]:
    """Return the layers that share a weight, as in Zamba's attention; a tied head does not count."""
    tables = (model.get_output_embeddings(), model.get_input_embeddings())
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor) and module not in tables:
            owners.setdefault(id(weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _read_by_kernels(model: PreTrainedModel) -> set[str]:
    """Return Mamba's layers whose weight is read without a call: an adapter would do nothing."""
    return {
        f"{name}.{part}"
        for name, mixer in model.named_modules()
        if hasattr(mixer, "A_log") and hasattr(mixer, "D")
        for part in ("conv1d", "dt_proj", "out_proj")
    }


def base_name(name: str) -> str:
    """Return a weight's name in the model without adapters."""
    return name.replace(_BASE, "")


def adapted_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that LoRA wraps, by their weights' names; those of one module's experts are nested."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield f"{base_name(name)}.{getattr(module, 'parameter_name', 'weight')}", module


def expert_adapters(model: nn.Module) -> list[Any]:
    """Return peft's layers of experts in one tensor, which add their update to the whole tensor."""
    return [module for module in model.modules() if hasattr(module, "parameter_name")]


def merged(module: Any) -> Tensor:
    """Return the weight of a layer that LoRA wraps, adapters added in float32 (peft rounds each sum)."""
    of_experts = hasattr(module, "parameter_name")
    weight = whole(module.get_param() if of_experts else dequantized(module)).detach()
    total = weight.float()
    for adapter in module.active_adapters:
        parts = ((f"layer.{name}", part) for name, part in module.named_parameters())
        values = {name: whole(part).float() for name, part in parts if name.startswith("layer.lora_")}
        if of_experts:  # peft casts the update to the dtype and shape of the experts' tensor
            values |= {f"layer.{n}": total for n, p in module.named_parameters() if p is module.get_param()}
        total = total + functional_call(_Delta(module), values, (adapter,))
    return total.to(weight.dtype)


class _Delta(nn.Module):
    """The update of an adapter as a forward, whose weights `functional_call` can replace."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, adapter: str) -> Tensor:
        delta: Tensor = self.layer.get_delta_weight(adapter)
        return delta
