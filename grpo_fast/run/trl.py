"""Run scripts of TRL and Unsloth: `GRPOTrainer`, `GRPOConfig` and `FastLanguageModel`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.run.loaded import lora_section
from grpo_fast.run.python import Run, train

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
NO_EFFECT = ("max_seq_length", "fast_inference", "max_lora_rank", "gpu_memory_utilization", "random_state")


class GRPOConfig:
    """TRL's GRPOConfig for scripts without TRL; TRL's class works as well."""

    def __init__(self, output_dir: str = "trainer_output", **arguments: Any) -> None:
        self.__dict__.update(arguments, output_dir=output_dir)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class GRPOTrainer:
    """TRL's trainer on `grpo_fast.train`, with the same arguments and errors."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        self.args = GRPOConfig() if args is None else args
        self._arguments: dict[str, Any] = {"model": model, "reward_funcs": reward_funcs, "args": self.args}
        self._arguments |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        self._arguments |= {"processing_class": processing_class, **others}
        self._run: Run | None = None

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> Run:
        self._run = train(**self._arguments, resume=resume_from_checkpoint or False)
        return self._run

    @property
    def run(self) -> Run:
        """The finished run; RuntimeError before `train` has returned."""
        if self._run is None:
            raise RuntimeError("call train() first")
        return self._run

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        """The trained model; with LoRA it has peft's `merge_and_unload`, as in TRL."""
        return self.run.policy.model

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        return self.run.policy.tokenizer

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model, or the adapter of a LoRA run; by default into the run's folder."""
        adapter = self.run.config.model.lora is not None
        self.run.policy.save_pretrained(output_dir or self.run.folder, adapter=adapter)

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Do nothing where `args` has pushed the run, else raise ValueError."""
        if self.run.config.hub is None:
            raise ValueError("args.push_to_hub is not set: set it, and args.hub_model_id to owner/name")


class FastLanguageModel:
    """Unsloth's loader for scripts without Unsloth; a model is the section `model`, which the run loads."""

    @staticmethod
    def from_pretrained(
        model_name: str, *, load_in_4bit: bool = False, dtype: Any = None, **others: Any
    ) -> tuple[dict[str, Any], PreTrainedTokenizerBase]:
        """Return a model for `train`, and its tokenizer; raise TypeError for an unknown option."""
        from grpo_fast.config.policy import ModelConfig
        from grpo_fast.policy import load_tokenizer

        _leave(others)
        section: dict[str, Any] = {"path": model_name}
        if dtype is not None:
            section["dtype"] = str(dtype).removeprefix("torch.")
        tokenizer = load_tokenizer(ModelConfig(**section))  # 4 bits need get_peft_model's LoRA
        return section | {"quantization": "nf4" if load_in_4bit else None}, tokenizer

    @staticmethod
    def get_peft_model(
        model: dict[str, Any],
        r: int = 16,
        target_modules: Sequence[str] | str = "all-linear",
        lora_alpha: Any = 16,
        lora_dropout: float = 0,
        use_gradient_checkpointing: Any = "auto",
        **others: Any,
    ) -> dict[str, Any]:
        """Return the model with LoRA; raise TypeError or ConfigError for unsupported options."""
        import torch
        from peft import LoraConfig

        kept: dict[str, Any] = {name: others.pop(name) for name in ("bias", "use_rslora") if name in others}
        _leave(others)
        kept |= {"target_modules": target_modules if isinstance(target_modules, str) else [*target_modules]}
        adapters = LoraConfig(r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, **kept)
        if (checkpointing := use_gradient_checkpointing) == "unsloth":  # a CPU has nothing to offload to
            checkpointing = "offload" if torch.cuda.is_available() else True
        return {**model, "lora": lora_section(adapters), "gradient_checkpointing": checkpointing}


def _leave(options: dict[str, Any]) -> None:
    """Log options that have no effect here; raise TypeError for unknown options that are set."""
    if unknown := [name for name, value in options.items() if name not in NO_EFFECT and value]:
        raise TypeError(f"{', '.join(unknown)}: FastLanguageModel has no such option here; leave it out")
    if idle := [name for name in options if name in NO_EFFECT]:
        logger.warning("not used: %s (lengths, seed and vLLM are keys of the run)", ", ".join(idle))
