"""vLLM's linear layers on the trainer's 4-bit tensors, without a copy.

vLLM has no bitsandbytes since 0.28. The quantization registered here allocates nothing. Its loader keeps the
tensors that it gets: one for each part of a fused layer (q, k and v; gate and up), whose products are
concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

NAME = "grpo_fast_4bit"
_ORDER = {"q": 0, "k": 1, "v": 2}  # vLLM's names of parts; others are numbers


def handed_out(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield aliases of the weights with their `quant_state`; vLLM's loaders set attributes on them."""
    for name, weight in weights.items():
        alias: Any = weight.detach()
        alias.quant_state = getattr(weight, "quant_state", None)
        yield name, alias


def register() -> str:
    """Register the quantization in vLLM, and return its name."""
    from bitsandbytes import matmul_4bit
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class SharedLinear(LinearMethodBase):
        def create_weights(self, layer: Any, *sizes: object, **attributes: object) -> None:
            layer.parts = {}
            layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            layer.weight.weight_loader = partial(_keep, layer)

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.parts = [part for _, part in sorted(layer.parts.items())]
            _require_whole(layer)

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            products = [
                # Models may have some layers that are not quantized.
                linear(x, part) if part.quant_state is None else matmul_4bit(x, part, part.quant_state)
                for part in layer.parts
            ]
            product = torch.cat(products, -1) if len(products) > 1 else products[0]
            return product if bias is None else product + bias

    class SharedWeights(QuantizationConfig):
        def get_name(self) -> Any:
            return NAME

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16, torch.float16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0  # bitsandbytes has checked the GPU

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> SharedWeights:
            return cls()

        def get_quant_method(self, layer: nn.Module, prefix: str) -> SharedLinear | None:
            return SharedLinear() if isinstance(layer, LinearBase) else None

    register_quantization_config(NAME)(SharedWeights)
    return NAME


def _keep(layer: Any, _: Tensor, weight: Any, part: Any = None) -> None:
    """Keep a part of a layer; newer versions of vLLM pass its place as `weight.shard_id`."""
    part = getattr(weight, "shard_id", part)
    layer.parts[_ORDER.get(part, part or 0)] = weight


def _require_whole(layer: Any) -> None:
    shapes = [tuple((part.quant_state or part).shape) for part in layer.parts]
    rows = sum(shape[0] for shape in shapes)
    if rows != layer.output_size or any(shape[1:] != (layer.input_size,) for shape in shapes):
        raise ValueError(
            f"vLLM's layout of {layer.prefix}, {layer.output_size} x {layer.input_size}, differs from the "
            f"policy's {shapes}; set rollout.vllm.share_weights to false, for a copy in full precision"
        )
