"""Which model is trained, and by which steps: the sections `model` and `optimizer`."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_fast.config.paths import user_path
from grpo_fast.config.section import (
    BandConfig,
    Count,
    Fraction,
    NotNegative,
    Positive,
    PositiveInt,
    Section,
)
from grpo_fast.objective.config import refuse_unread

State = Literal["optimizer", "master"]
"""What an optimiser keeps of each parameter: Adam's moments, and the float32 master of a 16-bit one."""

Decay = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Section):
    """Low-rank adapters in place of the weights (Hu et al. 2021, arXiv:2106.09685), scaled by alpha / r."""

    r: PositiveInt = Field(16, description="rank")
    alpha: Positive = Field(32.0, description="the adapter's product is scaled by alpha / r")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the adapter's inputs left out"
    )
    target_modules: str | list[str] | None = Field(
        "all-linear",
        description="names of modules, a regular expression, or all linear layers without the head, as peft "
        "takes them; null: peft's choice for the type of model, mostly queries and values",
    )
    target_parameters: list[str] | None = Field(
        None,
        description="names of parameters that no linear layer holds, as peft takes them, such as "
        "mlp.experts.gate_up_proj; they need dropout = 0. null: what peft adds by itself for some mixtures",
    )


class ModelConfig(Section):
    """Which model, where, in which precision, and what of it is trained."""

    path: str = Field(
        description="a folder, a hub id, or `package:NAME` for a GGUF file shipped by a Python package"
    )
    tokenizer: str | None = Field(
        None, description="the tokenizer's folder or hub id, where it is not the model's own"
    )
    revision: str | None = Field(
        None, description="of a hub id: branch, tag or commit; null: the default branch"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="of weights and computation; the head's logits are float32. auto: bfloat16 on a GPU, on "
        "a CPU bfloat16 or float32, whichever it multiplies faster; a resumed run keeps its own",
    )
    device: str = Field("auto", description="cpu, cuda or cuda:N; auto: the GPU where there is one")
    attention: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"] = Field(
        "auto",
        description="auto: on a GPU in 16 bits the newest flash-attn that is installed and fits GPU and "
        "model, else torch's own FlashAttention-2; SDPA where neither fits and on a CPU",
    )
    packing: Literal["auto", "none"] = Field(
        "auto",
        description="none: each completion is a row with its prompt, by the model's own attention, which is "
        "slower and right for whatever transformers computes; auto: completions share their prompt, none "
        "where a model cannot be packed",
    )
    quantization: Literal["nf4"] | None = Field(
        None,
        description="nf4: all linear layers but the head in 4 bits, as QLoRA has them; it needs lora, and "
        "bitsandbytes. A model that is saved in bitsandbytes' 4 bits stays so without it",
    )
    lora: LoraConfig | None = Field(
        None, description="train adapters instead of the weights; {}: the defaults"
    )
    train_lm_head: bool = Field(
        True, description="false freezes the head, tied or not: no gradient of width V"
    )
    train_router: bool = Field(
        True, description="false freezes the routers of a mixture of experts, which choose a token's experts"
    )
    router_aux_loss: Positive | None = Field(
        None,
        description="coefficient of a mixture's load-balancing loss, as transformers computes it of the "
        "tokens of a micro-batch, in GRPO's loss; null: none",
    )
    head: Literal["auto", "triton", "reference"] = Field(
        "auto",
        description="what computes the head. auto: kernels where they run, and plain torch with a warning "
        "where they fail or differ from it at the start; triton: that is an error; reference: plain torch",
    )
    head_tolerance: float | None = Field(
        None,
        ge=0,
        description="root mean square error of the head's gradient, which is drawn without bias, in units of "
        "rounding to bfloat16; 0: exact, the same on every device; null: the default where kernels run",
    )
    gradient_checkpointing: bool | Literal["mlp", "offload", "auto"] = Field(
        "auto",
        description="recompute activations in the backward, of whole layers or of their MLPs alone: less "
        "memory, more time; offload: of whole layers, whose inputs wait in the host's memory; auto: on a GPU "
        "by the plan, elsewhere and without rollouts false",
    )
    liger_kernels: Literal["auto"] | bool = Field(
        "auto",
        description="liger-kernel's layer kernels; auto: on a GPU where it is installed, for the types of "
        "models that it computes as transformers does",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="torch.compile of each layer; auto: on a GPU without Liger, not of experts",
    )
    chat_template: str | None = Field(
        None, description="a Jinja file, or a template's text, in place of the tokenizer's own"
    )
    trust_remote_code: bool = Field(
        False, description="true runs the Python code that the model's repository ships, whatever it does"
    )

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> ModelConfig:
        if self.path.startswith("package:") or user_path(self.path, "path").is_dir():
            refuse_unread(self, ["revision"], f"with path = {self.path!r}, which is no hub id")
        if self.head == "reference":
            refuse_unread(self, ["head_tolerance"], "by head = 'reference', whose gradient is exact")
        return self

    @property
    def recomputed(self) -> Literal[True, "mlp", "offload"] | None:
        """What the backward recomputes; None also of an `auto` that nothing has resolved."""
        how = self.gradient_checkpointing
        return None if how is False or how == "auto" else how


class ReferenceConfig(Section):
    """The frozen model of the KL, which is the teacher of a distillation."""

    path: str | None = Field(
        None,
        description="another model with the tokens of `model.path`, such as the teacher of `method: opd`; "
        "null: the policy as it was loaded",
    )
    revision: str | None = Field(None, description="as `model.revision`")
    quantization: Literal["nf4"] | None = Field(
        None, description="nf4: its linear layers but the head in 4 bits, by bitsandbytes"
    )
    weights: Literal["loaded", "policy"] = Field(
        "loaded", description="policy: the weights under training, at each step, with prompt_template"
    )
    prompt_template: str | None = Field(
        None,
        description="what the teacher reads in place of the user's last message: str.format over {prompt}, "
        "the row's columns, {solution}, another completion of the prompt whose reward reaches "
        "success_threshold, and {feedback}, which a reward logs by log_extra. Completions that have neither "
        "of the two that it names do not train. null: what the policy reads",
    )
    success_threshold: float = Field(1.0, description="of {solution}: reward of a completion that succeeds")

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> ReferenceConfig:
        if self.path is None:
            refuse_unread(self, ["revision", "quantization"], "without path, another model")
        elif self.weights == "policy":
            raise ValueError(
                f"reference.path = {self.path!r} is another model than weights = 'policy' says: leave path "
                "out, or set weights to loaded"
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
        """The names in braces of the template; raises ValueError where it is no format string."""
        try:
            parsed = [*Formatter().parse(self.prompt_template or "")]
        except ValueError as error:
            raise ValueError(
                f"reference.prompt_template = {self.prompt_template!r:.70} is no format string ({error}): "
                "write a brace of the text itself twice"
            ) from None
        return [name for _, name, _, _ in parsed if name is not None]

    def model(self, policy: ModelConfig) -> ModelConfig:
        """Return the section `model` of the reference; what it does not say is as the policy has it."""
        own = self.model_dump(include={"path", "revision", "quantization"})
        # Nothing of it trains. It has adapters by name only, without which 4 bits are refused.
        own |= {"tokenizer": None, "chat_template": None, "lora": LoraConfig(r=1)}
        return policy.model_copy(update=own)


class RateBandConfig(BandConfig):
    """A factor of the scheduled learning rate that follows a metric of the steps."""

    metric: str = Field("reward/mean", description="a name of docs/metrics.md that the steps of the run have")
    min: Positive = Field(description="the factor at least")
    max: Positive = Field(description="the factor at most")

    @model_validator(mode="after")
    def _holds_one(self) -> RateBandConfig:
        if not self.min <= 1 <= self.max:
            raise ValueError(f"min = {self.min} and max = {self.max} must hold 1, where the factor begins")
        return self


class OptimizerConfig(Section):
    """AdamW, the learning rate's schedule and the gradient's clip."""

    kind: Literal["adamw", "adamw_8bit", "adamw_offload"] = Field(
        "adamw",
        description="adamw_8bit keeps the moments in 8 bits, by torchao; adamw_offload keeps them and "
        "float32 masters in the host's memory, from where they visit the device in each step: what "
        "memory.offload = [optimizer, master] does, which goes with adamw_8bit too",
    )
    stochastic_rounding: bool = Field(
        False,
        description="torchao rounds bfloat16 weights up or down at random after each step, in place of "
        "float32 masters: 4 bytes a parameter less, and small steps still add up",
    )
    learning_rate: Positive = Field(1e-6, description="after the warmup")
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = Field(
        (0.9, 0.95), description="decays of the two moments, each in [0, 1)"
    )
    # A smaller one would be zero in float32.
    eps: Annotated[float, Field(ge=1e-20)] = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NotNegative = Field(0.0, description="decoupled, times the learning rate")
    max_grad_norm: Positive | None = Field(
        1.0, description="the gradient's norm is clipped to it; null: never"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after the warmup, over max_steps"
    )
    warmup_steps: Count | Fraction = Field(
        0,
        description="steps in which the learning rate rises in a straight line; with epochs, below 1 a share "
        "of their steps",
    )
    min_learning_rate_ratio: Fraction = Field(
        0.0, description="where linear and cosine end, as a share of learning_rate"
    )

    band: RateBandConfig | None = Field(
        None, description="multiply the scheduled rate by a factor that follows a metric; null: never"
    )

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> OptimizerConfig:
        if self.schedule == "constant":
            refuse_unread(self, ["min_learning_rate_ratio"], "by schedule = 'constant'")
        return self
