"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): a base in 4 bits, by bitsandbytes."""

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
    """Return whether linear layers are quantized; ValueError or ImportError if that is not supported."""
    saved = dict(getattr(architecture, "quantization_config", None) or {})
    if not saved and model.quantization is None:
        return False
    what = f"model.quantization = {model.quantization!r}"
    if saved:
        method = saved.get("quant_method", "of an unknown kind")
        what = f"the weights of model.path = {model.path!r} are quantized ({method})"
        if method != "bitsandbytes":
            remedy = "give the model in bfloat16, and model.quantization = nf4"
            raise ValueError(f"{what}, and adapters train only on those of bitsandbytes; {remedy}")
        if not saved.get("load_in_4bit"):
            remedy = "give the model in bfloat16 or in 4 bits"
            raise ValueError(f"{what} in 8 bits, which round each token by the others in its batch; {remedy}")
        if model.quantization is not None:
            raise ValueError(f"{what} already; leave model.quantization = {model.quantization!r} out")
    if model.lora is None:
        raise ValueError(f"{what}, and quantized weights do not train: train adapters, model.lora = {{}}")
    if expert_count(architecture):
        raise ValueError(f"{what}: a mixture of experts has few linear layers to quantize; use a dense model")
    if architecture.model_type == "gpt2":
        raise ValueError(f"{what}: GPT-2 has no linear layers, but transposed ones; use another model")
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"{what}, which needs bitsandbytes: pip install 'grpo-fast[bitsandbytes]'")
    # It warns about kernels that it would download for some CPUs.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return True


def loading_settings(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Return the `from_pretrained` arguments for a quantized model."""
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
    """Let every layer compute in `dtype`, and keep the layout of quantized weights."""
    if model.dtype != dtype:  # transformers 5.23 keeps the saved dtype of other weights
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
    modules: Iterable[Any] = model.modules()
    for layer in modules:
        if is_quantized(getattr(layer, "weight", None)):
            layer.weight.quant_state.dtype = layer.compute_dtype = dtype
            layer.compute_type_is_set = True
            layer.support_avx512bf16_for_cpu = False  # it would repack the weight to generate
    return model


def unquantized(architecture: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration without quantization."""
    architecture = copy.deepcopy(architecture)
    if hasattr(architecture, "quantization_config"):
        del architecture.quantization_config
    return architecture


def dequantized(module: nn.Module) -> Tensor:
    """Return a layer's weight without adapters, detached and in full precision."""
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(getattr(module, "base_layer", module)).detach()


def count_numbers(weight: Tensor) -> int:
    """Count the elements of a weight; in 4 bits a byte holds two."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else state.shape.numel()
