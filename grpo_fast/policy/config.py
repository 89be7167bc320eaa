"""Which model is trained, and by which steps: the sections `model` and `optimizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_fast.section import Fraction, PositiveInt, Section


class LoraConfig(Section):
    """Low-rank adapters in place of the weights (Hu et al. 2021, arXiv:2106.09685), scaled by alpha / r."""

    r: PositiveInt = 16
    alpha: float = 32.0
    dropout: Fraction = 0.0
    target_modules: str | list[str] = "all-linear"


class ModelConfig(Section):
    """Which model, where, in which precision, and what of it is trained."""

    path: str = Field(
        description="a folder, a hub id, or `package:NAME` for a GGUF file shipped by a Python package"
    )
    revision: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "auto"
    attention: Literal["auto", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    lora: LoraConfig | None = None
    train_lm_head: bool = Field(
        True, description="false freezes the head, tied or not: no gradient of width V"
    )
    gradient_checkpointing: bool = False
    liger_kernels: bool = Field(False, description="liger-kernel's layer kernels; GPU only")
    chat_template: str | None = Field(None, description="a Jinja file, when the tokenizer has no template")
    trust_remote_code: bool = Field(
        False, description="true runs the Python code that the model's repository ships, whatever it does"
    )


class OptimizerConfig(Section):
    """AdamW, the learning rate's schedule and the gradient's clip."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_learning_rate_ratio: Fraction = 0.0
