"""Low-rank adapters by peft: on which weights, experts in one tensor among them, and the weights merged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.func import functional_call

from grpo_fast.config.policy import LoraConfig
from grpo_fast.distributed.shards import whole
from grpo_fast.policy.experts import fused_experts, is_router
from grpo_fast.policy.quantization import dequantized
from grpo_fast.policy.vision import language_model, sees_images

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_BESIDE_THE_LANGUAGE_MODEL = r"(?!.*\blanguage_model\.).*"  # names of modules, for peft
_BASE = ".base_layer"  # in the name of what an adapter wraps


def add_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Adapters in the model's dtype on every layer named; `all-linear` leaves the output head out, the
    routers of a mixture of experts, weights that layers share, and what Mamba's kernels read.

    In float32 each would keep a float32 copy of its input for the backward; the optimiser has the masters.

    Raises:
        ValueError: modules that the model does not have, or that cannot be adapted.
    """
    import peft

    given = f"model.lora.target_modules = {config.target_modules!r}"
    shared = _shared(model)
    excluded = [] if language_model(model) is model else [_BESIDE_THE_LANGUAGE_MODEL]
    all_linear = str(config.target_modules).lower() == "all-linear"
    if all_linear:
        excluded += map(re.escape, sorted(shared | _read_by_kernels(model)))
    alpha: Any = config.alpha  # annotated as an int, and used as a number
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        exclude_modules="|".join(excluded) or None,
        task_type="CAUSAL_LM",
    )
    try:
        if fused_experts(model):
            adapted = _with_experts(model, lora)
        else:
            adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from error
    settings: Any = model.config if sees_images(model.config) else model.config.get_text_config()
    tied = getattr(settings, "tie_word_embeddings", False)
    if all_linear and (left := _experts_left_out(model)):
        logger.warning(
            "%s leaves out %s and whatever else of experts is no linear layer and no tensor (experts, rows, "
            "columns): peft has no adapter for it",
            given,
            left,
        )
    tables = [model.get_output_embeddings(), *([model.get_input_embeddings()] if tied else [])]
    if any(isinstance(table, peft.tuners.lora.LoraLayer) for table in tables):
        raise ValueError(
            f"{given} reaches the output head, whose weight the loss takes as it is; leave the head and an "
            "embedding tied to it out"
        )
    wrapped = {name for name, part in model.named_modules() if isinstance(part, peft.tuners.lora.LoraLayer)}
    if of_several := sorted(shared & wrapped):
        raise ValueError(
            f"{given} reaches {of_several[0]}, whose weight several layers share, and each would have an "
            "adapter of its own; leave it out, or set all-linear"
        )
    return adapted


def _experts_left_out(model: PreTrainedModel) -> str | None:
    """One of the matrices of experts that no adapter reaches, as DBRX has them."""
    adapted = {name for name, _ in adapted_weights(model)}
    found = (
        name
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.ndim > 1 and not name.endswith("bias") and "lora_" not in name
    )
    return next((n for n in found if not is_router(n) and base_name(n) not in adapted), None)


def _shared(model: PreTrainedModel) -> set[str]:
    """Layers whose weight another one has as well, as Zamba's attention; a tied head is not meant."""
    tables = (model.get_output_embeddings(), model.get_input_embeddings())
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor) and module not in tables:
            owners.setdefault(id(weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _read_by_kernels(model: PreTrainedModel) -> set[str]:
    """Layers of Mamba whose weight is read as it is, without calling them: an adapter would do nothing."""
    return {
        f"{name}.{part}"
        for name, mixer in model.named_modules()
        if hasattr(mixer, "A_log") and hasattr(mixer, "D")
        for part in ("conv1d", "dt_proj", "out_proj")
    }


def _with_experts(model: PreTrainedModel, lora: Any) -> PeftModel:
    """The adapted model, by names of our own finding.

    Left to itself, peft takes names for those of the checkpoint, for some types of models: it adapts the
    router unasked, and leaves out linear layers that are called as the experts' are.
    """
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    modules, parameters = _targets(model, lora)
    if not modules and not parameters:
        raise ValueError("no module of the model has such a name")
    if parameters and lora.lora_dropout:
        raise ValueError(
            f"model.lora.dropout = {lora.lora_dropout} cannot be applied to {min(parameters)}, one tensor of "
            "several experts; set it to 0, or name other modules, such as [q_proj, k_proj, v_proj, o_proj]"
        )
    lora.target_modules, lora.exclude_modules = DUMMY_TARGET_MODULES, None  # none
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    lora.target_modules, lora.target_parameters = modules, parameters
    unknown = nn.Module()  # in which peft looks for no type of model
    unknown.model = model
    adapted.base_model.inject_adapter(unknown, "default", autocast_adapter_dtype=False)
    return adapted


def _targets(model: PreTrainedModel, lora: Any) -> tuple[set[str], set[str]]:
    """Names of the modules to adapt, and of the parameters that no linear layer holds.

    Raises:
        ValueError: the checkpoint has several names for parts of one tensor, and not all of them are meant.
    """
    from peft.tuners.tuners_utils import check_target_module_exists as names
    from transformers.pytorch_utils import Conv1D

    excluded = re.compile(lora.exclude_modules or "(?!)")  # of nothing
    experts = {name: tensor for name, tensor in fused_experts(model).items() if not excluded.fullmatch(name)}
    head = model.get_output_embeddings()
    plain = (nn.Linear.forward, Conv1D.forward)  # to the result of another, peft's adapters do not fit
    if str(lora.target_modules).lower() == "all-linear":
        found = {n for n, m in model.named_modules() if type(m).forward in plain and m is not head}
        return {n for n in found if not (is_router(n) or excluded.fullmatch(n))}, {*experts}
    modules, parameters = set(), set()
    for name, module in model.named_modules():
        if names(lora, name):
            own = [n for n, p in module.named_parameters(recurse=False) if f"{name}.{n}" in experts]
            if is_router(name) and type(module).forward not in plain and hasattr(module, "weight"):
                own = ["weight"]
            modules |= set() if own else {name}
            parameters |= {f"{name}.{n}" for n in own}
    for name in experts.keys() - parameters:
        parts = {part: bool(names(lora, part)) for part in _checkpoint_names(model, name)}
        if names(lora, name) or all(parts.values()):
            parameters.add(name)
        elif any(parts.values()):
            missing = min(part for part, meant in parts.items() if not meant)
            raise ValueError(
                f"of {name}, which is one tensor, it leaves {missing.rpartition('.')[2]} out; name both, or "
                "neither"
            )
    return modules, parameters


def _checkpoint_names(model: PreTrainedModel, name: str) -> set[str]:
    """What the checkpoint calls the matrices of one tensor of experts, as if each lay in its place."""
    from transformers.core_model_loading import revert_weight_conversion

    place = name.rpartition(".")[0]
    tensor = model.get_parameter(name).detach().to("meta")
    saved = revert_weight_conversion(model, {name: tensor})
    return {f"{place}.{part.removesuffix('.weight').rpartition('.')[2]}" for part in saved}


def base_name(name: str) -> str:
    """A weight's name in the model without adapters."""
    return name.replace(_BASE, "")


def adapted_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that LoRA wraps, by their weights' names. Of a module with several tensors of experts each
    has a layer, one within the other."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield f"{base_name(name)}.{getattr(module, 'parameter_name', 'weight')}", module


def expert_adapters(model: nn.Module) -> list[Any]:
    """peft's layers of experts in one tensor: each adds what its adapters make to the whole tensor before
    experts compute."""
    return [module for module in model.modules() if hasattr(module, "parameter_name")]


def merged(module: Any) -> Tensor:
    """The weight of a layer that LoRA wraps, adapters added in float32: peft rounds each to its own dtype."""
    of_experts = hasattr(module, "parameter_name")
    weight = whole(module.get_param() if of_experts else dequantized(module)).detach()
    found = weight.float()
    for adapter in module.active_adapters:
        parts = ((f"layer.{name}", part) for name, part in module.named_parameters())
        values = {name: whole(part).float() for name, part in parts if name.startswith("layer.lora_")}
        if of_experts:  # what is added to them gets the dtype and the shape of what they are
            values |= {f"layer.{n}": found for n, p in module.named_parameters() if p is module.get_param()}
        found = found + functional_call(_Delta(module), values, (adapter,))
    return found.to(weight.dtype)


class _Delta(nn.Module):
    """What one adapter adds, as a forward: of weights that `functional_call` puts in place of a layer's."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, adapter: str) -> Tensor:
        delta: Tensor = self.layer.get_delta_weight(adapter)
        return delta
