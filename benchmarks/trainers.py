"""What trainers are compared on: a model, prompts, a reward that every group varies in; and TRL's trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.objective import GRPOLossConfig
from grpo_fast.policy.source import resolve_source

from .measure import Stopwatch
from .models import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOTrainer

LOSS = GRPOLossConfig(loss_type="dapo", epsilon_low=0.2, epsilon_high=0.28)
TRL_LOSS = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}
"""The same for GRPOConfig."""
WORDS = vocabulary_of("words")
Reward = Callable[..., list[float]]


@dataclass(frozen=True)
class Task:
    """A model, its prompts and its reward."""

    model: Path  # a folder that `from_pretrained` takes
    prompts: Sequence[str]
    reward: Reward
    options: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig
    lora_options: dict[str, Any] = field(default_factory=dict)  # the same, besides, for LoRA


def small_words(completions: list[str], **_: Any) -> list[float]:
    """Likes words of small number, of those that the architecture `words` knows."""
    words = [[word for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(1.0 - int(word[1:]) / WORDS for word in row) / 8 for row in words]


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Likes digits: every completion scores, so that every group has spread."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def words_task(folder: Path) -> Task:
    """The model that `save_model` saved there, 16 completions of up to 8 words a generation."""
    prompts = [f"w{i} w{(7 * i) % 50}" + " w3" * (i % 4) for i in range(48)]
    return Task(folder, prompts, small_words, {"learning_rate": 3e-3, "max_completion_length": 8})


def sums_task(model: str) -> Task:
    """A language model on `a + b =`, 8 completions of up to 8 tokens a generation: a second or two a step.

    Args:
        model: a folder with safetensors, or `package:NAME` of a Python package that ships one as GGUF.
    """
    prompts = [f"{3 + 5 * i % 41} + {2 + 7 * i % 37} =" for i in range(48)]
    options = {"learning_rate": 2e-5, "max_completion_length": 8, "per_device_train_batch_size": 2}
    return Task(Path(resolve_source(model)), prompts, share_of_digits, options, {"learning_rate": 2e-4})


def trl_trainer(
    kind: Callable[..., GRPOTrainer],
    folder: str,
    model: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    prompts: Sequence[str],
    reward: Reward,
    lora: bool = False,
    **options: Any,
) -> Any:
    """A trainer that writes and prints nothing; a model in a folder is loaded, in float32.

    Args:
        options: of GRPOConfig.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig

    if isinstance(model, Path):
        options["model_init_kwargs"] = {"dtype": "float32"}  # the masters; bf16 is TRL's autocast over them
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    trainer = kind(
        model=str(model) if isinstance(model, Path) else model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=folder, **quiet, **options),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer or AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=8, target_modules="all-linear") if lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def in_phase(method: Callable[..., Any], watch: Stopwatch, phase: str) -> Callable[..., Any]:
    """The method, its time counted for the phase."""

    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with watch.phase(phase):
            return method(*args, **kwargs)

    return timed
