"""The sections `model`, `reference` and `optimizer`."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_fast.config.paths import user_path
from grpo_fast.config.section import BandConfig, Count, Fraction, NotNegative, Positive, PositiveInt, Section
from grpo_fast.objective.config import refuse_unread

State = Literal["optimizer", "master"]
"""Optimizer state of a parameter: Adam's moments, and the float32 master of a 16-bit parameter."""

Decay = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Section):
    """Low-rank adapters in place of the weights (Hu et al. 2021, arXiv:2106.09685)."""

    r: PositiveInt = Field(16, description="rank")
    alpha: Positive = Field(32.0, description="the adapter's output is scaled by alpha / r")
    dropout: Decay = Field(0.0, description="dropout of the adapter's inputs")
    target_modules: str | list[str] | None = Field(
        "all-linear",
        description="as in PEFT: names of modules, a regular expression, or all linear layers except the "
        "head; null: PEFT's choice for the model, mostly queries and values",
    )
    target_parameters: list[str] | None = Field(
        None,
        description="as in PEFT: names of parameters outside of linear layers, such as "
        "mlp.experts.gate_up_proj; needs dropout = 0; null: PEFT's choice for some mixtures of experts",
    )


class ModelConfig(Section):
    """The model to train."""

    path: str = Field(description="a folder, a hub id, or `package:NAME` for a GGUF file of a Python package")
    tokenizer: str | None = Field(None, description="folder or hub id of a tokenizer; null: the model's")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id; null: the default")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="of weights and computation; logits are float32. auto: bfloat16 on a GPU, on a CPU "
        "bfloat16 or float32, whichever it multiplies faster; a resumed run keeps its dtype",
    )
    device: str = Field("auto", description="cpu, cuda or cuda:N; auto: a GPU if there is one")
    attention: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"] = Field(
        "auto",
        description="auto: in 16 bits on a GPU the newest flash-attn that is installed and supports GPU and "
        "model, else torch's FlashAttention-2; else SDPA",
    )
    packing: Literal["auto", "none"] = Field(
        "auto",
        description="auto: completions share their prompt in packed sequences, if the model supports it; "
        "none: padded batches with the model's own attention, slower and right for every model",
    )
    quantization: Literal["nf4"] | None = Field(
        None,
        description="nf4: QLoRA, with 4-bit linear layers except the head; needs lora and bitsandbytes. A "
        "model saved in 4 bits by bitsandbytes stays so with null",
    )
    lora: LoraConfig | None = Field(None, description="train adapters instead of the weights; {}: defaults")
    train_lm_head: bool = Field(True, description="false freezes the head, tied or not")
    train_router: bool = Field(True, description="false freezes the routers of a mixture of experts")
    router_aux_loss: Positive | None = Field(
        None,
        description="coefficient of a mixture's load-balancing loss in GRPO's loss, computed over a "
        "micro-batch as in transformers; null: none",
    )
    head: Literal["auto", "triton", "reference"] = Field(
        "auto",
        description="implementation of the head. auto: Triton kernels where they run, with a warning and "
        "plain torch where they fail at the start; triton: that is an error; reference: plain torch",
    )
    head_tolerance: float | None = Field(
        None,
        ge=0,
        description="root mean square error of the head's unbiased gradient, relative to rounding to "
        "bfloat16; 0: exact, the same on every device; null: the kernels' default",
    )
    gradient_checkpointing: bool | Literal["mlp", "offload", "auto"] = Field(
        "auto",
        description="recompute activations in the backward pass, of layers (true) or of their MLPs (mlp); "
        "offload: of layers, with their inputs on the CPU; auto: on a GPU by the plan, else false",
    )
    liger_kernels: Literal["auto"] | bool = Field(
        "auto",
        description="Liger's kernels of layers; auto: on a GPU where liger-kernel is installed, for models "
        "on which it agrees with transformers",
    )
    compile: Literal["auto"] | bool = Field(
        "auto", description="torch.compile of each layer; auto: on a GPU without Liger, not of experts"
    )
    chat_template: str | None = Field(None, description="a Jinja file, or its text; null: the tokenizer's")
    trust_remote_code: bool = Field(False, description="run the Python code of the model's repository")

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> ModelConfig:
        if self.path.startswith("package:") or user_path(self.path, "path").is_dir():
            refuse_unread(self, ["revision"], f"with path = {self.path!r}, which is no hub id")
        if self.head == "reference":
            refuse_unread(self, ["head_tolerance"], "by head = 'reference', whose gradient is exact")
        return self

    @property
    def recomputed(self) -> Literal[True, "mlp", "offload"] | None:
        """What the backward pass recomputes; None for an unresolved `auto`, too."""
        how = self.gradient_checkpointing
        return None if how is False or how == "auto" else how


class ReferenceConfig(Section):
    """The frozen reference of the KL, or the teacher of a distillation."""

    path: str | None = Field(
        None,
        description="another model with the vocabulary of `model.path`, such as the teacher of `method: "
        "opd`; null: the policy's initial weights",
    )
    revision: str | None = Field(None, description="as `model.revision`")
    quantization: Literal["nf4"] | None = Field(None, description="nf4: 4-bit linear layers except the head")
    weights: Literal["loaded", "policy"] = Field(
        "loaded", description="policy: the current weights at each step, with prompt_template"
    )
    prompt_template: str | None = Field(
        None,
        description="the teacher's user message, by str.format over {prompt}, the row's columns, {solution} "
        "(a completion of the prompt with a reward of at least success_threshold) and {feedback} (which a "
        "reward logs by log_extra). Completions without both do not train. null: as the policy",
    )
    success_threshold: float = Field(1.0, description="smallest reward of a {solution}")

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> ReferenceConfig:
        if self.path is None:
            refuse_unread(self, ["revision", "quantization"], "without path, another model")
        elif self.weights == "policy":
            raise ValueError(
                f"reference.path = {self.path!r} contradicts weights = 'policy': leave path out, or set "
                "weights to loaded"
            )
        if self.weights == "policy" and self.prompt_template is None:
            raise ValueError(
                "reference.weights = 'policy' without prompt_template compares the policy with itself: give "
                "a template with more than {prompt}, or set weights to loaded"
            )
        if "solution" not in self.fields:
            refuse_unread(self, ["success_threshold"], "without {solution} in prompt_template")
        return self

    @property
    def fields(self) -> list[str]:
        """The template's names in braces; ValueError where it is no format string."""
        try:
            parsed = [*Formatter().parse(self.prompt_template or "")]
        except ValueError as error:
            raise ValueError(
                f"reference.prompt_template = {self.prompt_template!r:.70} is no format string ({error}): "
                "double the braces of plain text"
            ) from None
        return [name for _, name, _, _ in parsed if name is not None]

    def model(self, policy: ModelConfig) -> ModelConfig:
        """Return the section `model` of the reference; the policy's values where it has none."""
        own = self.model_dump(include={"path", "revision", "quantization"})
        # Quantization requires adapters, although nothing of a reference trains.
        own |= {"tokenizer": None, "chat_template": None, "lora": LoraConfig(r=1)}
        return policy.model_copy(update=own)


class RateBandConfig(BandConfig):
    """A factor of the scheduled learning rate that follows a metric."""

    metric: str = Field("reward/mean", description="a metric of training steps, see docs/metrics.md")
    min: Positive = Field(description="smallest factor, at most 1")
    max: Positive = Field(description="largest factor, at least 1")

    @model_validator(mode="after")
    def _holds_one(self) -> RateBandConfig:
        if not self.min <= 1 <= self.max:
            raise ValueError(f"min = {self.min} and max = {self.max} must hold 1, the first factor")
        return self


class OptimizerConfig(Section):
    """AdamW, its learning rate's schedule, and gradient clipping."""

    kind: Literal["adamw", "adamw_8bit", "adamw_offload"] = Field(
        "adamw",
        description="adamw_8bit: moments in 8 bits, by torchao; adamw_offload: moments and float32 masters "
        "on the CPU, as by memory.offload = [optimizer, master], which also works with adamw_8bit",
    )
    stochastic_rounding: bool = Field(
        False,
        description="round bfloat16 weights up or down at random after each step, by torchao, in place of "
        "float32 masters: saves 4 bytes per parameter",
    )
    learning_rate: Positive = Field(1e-6, description="after the warmup")
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = Field(
        (0.9, 0.95), description="decays of the moments"
    )
    # A smaller one would be zero in float32.
    eps: Annotated[float, Field(ge=1e-20)] = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NotNegative = Field(0.0, description="decoupled, times the learning rate")
    max_grad_norm: Positive | None = Field(1.0, description="clip the gradient to this norm; null: never")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after the warmup, over max_steps"
    )
    warmup_steps: Count | Fraction = Field(
        0, description="steps of a linear warmup; with epochs, a value below 1 is a share of the steps"
    )
    min_learning_rate_ratio: Fraction = Field(
        0.0, description="final share of learning_rate (linear, cosine)"
    )
    band: RateBandConfig | None = Field(
        None, description="multiply the scheduled rate by a factor that follows a metric; null: no"
    )

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> OptimizerConfig:
        if self.schedule == "constant":
            refuse_unread(self, ["min_learning_rate_ratio"], "by schedule = 'constant'")
        return self
