"""vLLM's linear layers on the trainer's own 4-bit tensors: nothing is copied, nothing is sent again.

vLLM has no bitsandbytes since 0.28. The quantisation registered here gives a linear layer no memory, and a
loader that keeps the tensor it is handed: of a layer that vLLM fuses (q, k and v; gate and up) one for each
part, whose products are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

NAME = "grpo_fast_4bit"
_ORDER = {"q": 0, "k": 1, "v": 2}  # vLLM's names for parts; others are numbers


def handed_out(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """For vLLM's loaders, which mark what they are given: the same memory, and how 4-bit ones are decoded."""
    for name, weight in weights.items():
        alias: Any = weight.detach()
        alias.quant_state = getattr(weight, "quant_state", None)
        yield name, alias


def register() -> str:
    """The name under which this process's vLLM knows the quantisation."""
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
                # Models may be saved with some layers left out of the quantisation.
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
            return 0  # where bitsandbytes has none for a GPU, the policy would not have been loaded

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
    """As vLLM's loaders call it: with the part, or newer ones with a weight that is marked with it."""
    part = getattr(weight, "shard_id", part)
    layer.parts[_ORDER.get(part, part or 0)] = weight


def _require_whole(layer: Any) -> None:
    """Raises ValueError where what was loaded are not rows of the layer's weight."""
    shapes = [tuple((part.quant_state or part).shape) for part in layer.parts]
    rows = sum(shape[0] for shape in shapes)
    if rows != layer.output_size or any(shape[1:] != (layer.input_size,) for shape in shapes):
        raise ValueError(
            f"vLLM lays out {layer.prefix}, {layer.output_size} x {layer.input_size}, in its own way, not as "
            f"the policy's {shapes}; set rollout.vllm.share_weights to false, for a copy in full precision"
        )
