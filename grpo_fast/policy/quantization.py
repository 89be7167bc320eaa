"""A base in 4 bits under adapters (QLoRA: Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast.config.policy import ModelConfig
from grpo_fast.head.parameters import is_quantized
from grpo_fast.policy.experts import expert_count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def quantizes(model: ModelConfig, architecture: PreTrainedConfig) -> bool:
    """Whether linear layers are held in fewer bits: as configured, or because the model is saved so.

    Raises:
        ValueError: a quantisation that is not trained here, or that this model or configuration cannot have.
        ImportError: bitsandbytes is missing.
    """
    saved = dict(getattr(architecture, "quantization_config", None) or {})
    if not saved and model.quantization is None:
        return False
    what = f"model.quantization = {model.quantization!r}"
    if saved:
        method = saved.get("quant_method", "of an unknown kind")
        what = f"the weights of model.path = {model.path!r} are quantised ({method})"
        if method != "bitsandbytes":
            raise ValueError(
                f"{what}, and adapters are trained on those of bitsandbytes alone; give the model in "
                "bfloat16, as it is published beside them, and model.quantization = nf4"
            )
        if not saved.get("load_in_4bit"):
            raise ValueError(
                f"{what} in 8 bits, whose layers round a token by what else is in its batch: its "
                "log-probability would change with the packing; give the model in bfloat16 or in 4 bits"
            )
        if model.quantization is not None:
            raise ValueError(f"{what} already; leave model.quantization = {model.quantization!r} out")
    if model.lora is None:
        raise ValueError(
            f"{what}, and weights of so few bits are not trained: train adapters, model.lora = {{}}"
        )
    if expert_count(architecture):
        raise ValueError(f"{what}: a mixture of experts has few linear layers to quantise; use a dense model")
    if architecture.model_type == "gpt2":
        raise ValueError(
            f"{what}: GPT-2 keeps its matrices the other way round; use a model of linear layers"
        )
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"{what}, which needs bitsandbytes: pip install 'grpo-fast[bitsandbytes]'")
    # It warns that it would compute faster on some CPUs with kernels that it downloads.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return True


def loading_settings(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """How transformers loads a model that `quantizes`: layer by layer, onto the device."""
    settings: dict[str, Any] = {"device_map": {"": device}}
    if model.quantization is not None:
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=model.quantization,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, model.dtype),
        )
    return settings


def cast_rest(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Let every layer compute in `dtype`, whatever it was saved with; quantised weights keep one layout."""
    if model.dtype != dtype:  # transformers 5.23 leaves what is not quantised as it was saved
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
    modules: Iterable[Any] = model.modules()
    for layer in modules:
        if is_quantized(getattr(layer, "weight", None)):
            layer.weight.quant_state.dtype = layer.compute_dtype = dtype
            layer.compute_type_is_set = True
            layer.support_avx512bf16_for_cpu = False  # which would pack the weight anew to generate
    return model


def unquantized(architecture: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the model in full precision: a copy."""
    architecture = copy.deepcopy(architecture)
    if hasattr(architecture, "quantization_config"):
        del architecture.quantization_config
    return architecture


def dequantized(module: nn.Module) -> Tensor:
    """A layer's weight without adapters, detached: the numbers that a quantised layer computes with."""
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(getattr(module, "base_layer", module)).detach()


def count_numbers(weight: Tensor) -> int:
    """How many numbers a weight has, also one in 4 bits, which stores two in a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else state.shape.numel()
