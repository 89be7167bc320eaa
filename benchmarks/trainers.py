"""TRL's trainer, for all that measures it or compares with it: options, rewards, phases, what it logs."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.objective import GRPOLossConfig

from .measure import Stopwatch
from .models import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOTrainer

LOSS = GRPOLossConfig(loss_type="dapo", epsilon_low=0.2, epsilon_high=0.28)
TRL_LOSS = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}
"""The same for GRPOConfig."""
WORDS = vocabulary_of("words")
SEED = 7
_NUMBERS = "^(?!.*(time|per_second|flos))"  # names of what is the algorithm's
Reward = Callable[..., list[float]]


def small_words(completions: list[str], **_: Any) -> list[float]:
    """Likes words of small number, of those that the architecture `words` knows."""
    words = [[word for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(1.0 - int(word[1:]) / WORDS for word in row) / 8 for row in words]


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Likes digits: every completion scores, so that every group has spread."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


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
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig

    if isinstance(model, Path):
        options["model_init_kwargs"] = {"dtype": "float32"}  # the masters; bf16 is TRL's autocast over them
    usual = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1, "bf16": False}
    trainer = kind(
        model=str(model) if isinstance(model, Path) else model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=folder, **usual | options),
        # With a fingerprint, for some versions of pyarrow cannot be hashed.
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
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


def train_words(
    kind: type[GRPOTrainer], folder: Path, loss_type: str, steps: int, *, lora: bool = False, **options: Any
) -> list[dict[str, float]]:
    """What a trainer with TRL's interface logs of each step, on the model saved there.

    16 completions of up to 8 words a generation, two micro-batches a step, two steps a generation, KL, a clip
    range that is reached; from the same weights, prompts and seed as any other.

    Args:
        options: of GRPOConfig.
    """
    from transformers import set_seed

    usual = {
        "max_steps": steps,
        "use_cpu": not torch.cuda.is_available(),
        "loss_type": loss_type,
        "beta": 0.05,
        "epsilon": 0.05,
        "epsilon_high": 0.08,
        "learning_rate": 3e-3,
        "max_completion_length": 8,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "seed": SEED,
    }
    prompts = [f"w{i} w{(7 * i) % 50}" + " w3" * (i % 4) for i in range(48)]
    set_seed(SEED)
    with tempfile.TemporaryDirectory() as output:
        given = {"prompts": prompts, "reward": small_words, "lora": lora, **usual, **options}
        trainer = trl_trainer(kind, output, folder, **given)
        generate, generated = trainer.model.generate, itertools.count(SEED + 1)

        def seeded(*args: Any, **kwargs: Any) -> Tensor:
            result = generate(*args, **kwargs)
            torch.manual_seed(next(generated))  # TRL shuffles next
            return result

        trainer.model.generate = seeded
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def differences(a: Sequence[dict[str, float]], b: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest difference of each number that two histories log, relative where it is above one.

    What one of them lacks at a step is infinitely far.

    Raises:
        ValueError: they logged different names.
    """
    import pandas

    mine, other = (pandas.DataFrame(history, dtype=float).filter(regex=_NUMBERS) for history in (a, b))
    if alone := {*mine} ^ {*other}:
        raise ValueError(f"{sorted(alone)} is logged by one trainer only")
    apart = (mine - other).abs() / mine.abs().clip(lower=1)
    both_lack = mine.isna() & other.isna()
    return apart.where(~both_lack, 0.0).fillna(math.inf).max().to_dict()
