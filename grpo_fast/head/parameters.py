"""The parameters of a model's output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap")  # Gemma, xLSTM
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, Falcon-H1, Muse Glimmer
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite and MiniCPM, Inkling


@dataclass(frozen=True)
class HeadParameters:
    """logits = cap(logit_scale · (hidden @ weightᵀ + bias)), with cap(z) = softcap · tanh(z / softcap).

    Use it as `linear_logprob(hidden, head.weight, targets, **head.options)`.
    """

    weight: Tensor  # (V, H), the model's dtype
    bias: Tensor | None = None  # (V,)
    logit_scale: float = 1.0
    softcap: float | None = None
    tolerance: float | None = None  # of the gradient, as in `linear_logprob`

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `linear_logprob`: all fields but the weight."""
        return {name: value for name, value in vars(self).items() if name != "weight"}

    def logits(self, hidden: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
        """Compute logits (..., V) of hidden states (..., H), for checks and metrics, never for the loss."""
        logits = hidden.to(kind) @ self.weight.to(kind).T
        if self.bias is not None:
            logits = logits + self.bias.to(kind)
        logits = logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_parameters(model: PreTrainedModel) -> HeadParameters:
    """Read the head of a transformers causal language model and of its configuration.

    Raises:
        ValueError: the model has no output embedding, LoRA wraps it, or it is quantized.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head; give a causal language model")
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the output head is a {type(head).__name__}, but must be an nn.Linear; with LoRA, leave the "
            "head out of model.lora.target_modules"
        )
    if is_quantized(head.weight):
        raise ValueError(
            f"the output head is a {type(head).__name__}, whose weight the loss cannot read; save the model "
            "with the head in bfloat16, or give the model in bfloat16 and model.quantization = nf4"
        )
    config = model.config.get_text_config()
    return HeadParameters(
        weight=head.weight,
        bias=head.bias,
        logit_scale=_logit_scale(config),
        softcap=logit_softcap(config),
    )


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """Return s of the logits' bound s · tanh(logits / s), or None."""
    return next((cap for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)


def _logit_scale(config: PreTrainedConfig) -> float:
    scale = 1.0
    for name in (*_FACTORS, *_DIVISORS):
        if (value := getattr(config, name, None)) is not None:
            divides = name in _DIVISORS and config.model_type != "hyperclovax"  # which multiplies
            scale *= 1.0 / float(value) if divides else float(value)
    return scale


def is_quantized(weight: Tensor | None) -> bool:
    """Return whether a weight is in 4 bits."""
    return type(weight).__name__ == "Params4bit"  # of bitsandbytes, which need not be installed
