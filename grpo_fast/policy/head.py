"""The output head of a transformers model, as the loss needs it."""

from __future__ import annotations

from torch import nn

from grpo_fast.head import HeadParameters


def head_parameters(model: nn.Module) -> HeadParameters:
    """Read the head of a transformers causal language model, under the names its configuration uses.

    Raises:
        ValueError: the model has no output embedding, or LoRA wraps it.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head; give a causal language model")
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the output head is a {type(head).__name__}, not a plain linear layer; leave it out of "
            "model.lora.target_modules"
        )
    config = model.config.get_text_config()
    return HeadParameters(
        weight=head.weight,
        bias=head.bias,
        logit_scale=_logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _logit_scale(config: object) -> float:
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        return float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite and MiniCPM divide by it, HyperCLOVA X multiplies.
    return float(scaling) if config.model_type.startswith("hyperclovax") else 1.0 / float(scaling)
