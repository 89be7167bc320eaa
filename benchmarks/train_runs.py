"""Runs of our trainer and of TRL's, from the same weights, on the same prompts.

`STEPS` times whole steps phase by phase, with the usual settings of each trainer. `train` logs what a class
of trainer with TRL's interface computes, so that two runs can be compared number by number.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .measure import Stopwatch, memory_of, synchronize
from .train_tasks import Task

if TYPE_CHECKING:
    from trl import GRPOTrainer

OURS, TRL = "ours", "TRL"
GENERATE, REWARD, UPDATE, PREPARE = "generate", "reward", "update", "log-probabilities and padding"
SEED = 7
_TRL_PHASES = {
    "_generate_single_turn": GENERATE,
    "_calculate_rewards": REWARD,
    "_generate_and_score_completions": PREPARE,
    "training_step": UPDATE,
}
_LEARNING_RATE = 1e-6
_CLIP = 0.2, 0.28


# Time -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSizes:
    """What a step samples and trains on."""

    prompts: int
    group: int
    prompt: int  # tokens
    completion: int  # tokens at most
    micro_batch_tokens: int
    engine: str  # "transformers" or "vllm", in the trainer's process, for both
    dtype: str
    seed: int


@dataclass(frozen=True)
class StepTime:
    """One training step."""

    seconds: float
    phases: dict[str, float]
    tokens: int  # sampled


def ours_steps(task: Task, sizes: StepSizes, steps: int, device: torch.device) -> Iterator[StepTime]:
    """Steps of our trainer, with its own clock."""
    from grpo_fast.config import TrainConfig
    from grpo_fast.run import build_grpo_trainer

    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in task.prompts))
        config = TrainConfig.model_validate(
            {
                "output_dir": f"{folder}/run",
                "seed": sizes.seed,
                "max_steps": steps,
                "prompts_per_step": sizes.prompts,
                "micro_batch_tokens": sizes.micro_batch_tokens,
                "model": {"path": str(task.model), "dtype": sizes.dtype, "device": device.type},
                "dataset": {"source": str(prompts), "chat": False},
                "rewards": [{"reward": f"{task.reward.__module__}:{task.reward.__name__}"}],
                "rollout": {
                    "engine": sizes.engine,
                    "num_generations": sizes.group,
                    "max_completion_length": sizes.completion,
                },
                "loss": {"loss_type": "dapo", "epsilon_low": _CLIP[0], "epsilon_high": _CLIP[1]},
                "advantage": {"skip_flat_groups": False},
                "optimizer": {"learning_rate": _LEARNING_RATE},
            }
        )
        trainer = build_grpo_trainer(config)
        with trainer.engine:
            for _ in range(steps):
                synchronize(device)
                start = time.perf_counter()
                result = trainer.train_step()
                synchronize(device)
                seconds = time.perf_counter() - start
                phases = {
                    name.removeprefix("time/"): spent
                    for name, spent in result.timings.items()
                    if name.startswith("time/") and name != "time/step"
                }
                tokens = round(result.metrics["completion/length_mean"] * sizes.prompts * sizes.group)
                yield StepTime(seconds, phases, tokens)


def trl_steps(task: Task, sizes: StepSizes, steps: int, device: torch.device) -> Iterator[StepTime]:
    """Steps of TRL's GRPOTrainer, told by its callbacks; phases by the methods that do them.

    TRL's loop cannot be left between steps, so all of them are run before the first is handed on.
    """
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    watch = Stopwatch(device, wall=True)
    found: list[StepTime] = []
    sampled: list[int] = []  # tokens of each completion of the step

    class Clock(TrainerCallback):
        update = ExitStack()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sampled.clear()
            watch.start()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.update.enter_context(watch.phase(UPDATE))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.update.close()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found.append(StepTime(*watch.stop(), sum(sampled)))

    batch = sizes.prompts * sizes.group
    at_once = _divisor(batch, sizes.micro_batch_tokens // (sizes.prompt + sizes.completion))
    options = {
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": batch // at_once,
        "num_generations": sizes.group,
        "max_completion_length": sizes.completion,
        "loss_type": "dapo",
        "epsilon": _CLIP[0],
        "epsilon_high": _CLIP[1],
        "beta": 0.0,
        "learning_rate": _LEARNING_RATE,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": sizes.dtype == "bfloat16",
        "use_vllm": sizes.engine == "vllm",
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": sizes.engine == "vllm" and device.type == "cuda",
        "use_cpu": device.type == "cpu",
        "seed": sizes.seed,
        "logging_steps": steps + 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trl_trainer(GRPOTrainer, task, folder, steps, options)
        trainer.add_callback(Clock())
        for name, phase in _TRL_PHASES.items():
            setattr(trainer, name, _in_phase(getattr(trainer, name), watch, phase))
        generate = trainer._generate_single_turn

        def counting(*args: Any, **kwargs: Any) -> Any:
            result = generate(*args, **kwargs)
            sampled.extend(map(len, result[0]))
            return result

        trainer._generate_single_turn = counting
        trainer.train()
    yield from found


STEPS: dict[str, Callable[[Task, StepSizes, int, torch.device], Iterator[StepTime]]] = {
    OURS: ours_steps,
    TRL: trl_steps,
}


def _in_phase(method: Callable[..., Any], watch: Stopwatch, phase: str) -> Callable[..., Any]:
    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with watch.phase(phase):
            return method(*args, **kwargs)

    return timed


def _divisor(batch: int, at_most: int) -> int:
    """The largest divisor of the batch within the bound; at least one."""
    return max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(1, at_most))


# Numbers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How a trainer with TRL's interface is compared with another."""

    loss_type: str
    lora: bool = False
    precision: str = "float32"  # of the forward: "bfloat16" is TRL's autocast over float32 weights
    options: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig

    @property
    def name(self) -> str:
        return f"{self.loss_type}, {'LoRA' if self.lora else 'full'}, {self.precision}"


@dataclass(frozen=True)
class Run:
    """What one trainer logged."""

    history: list[dict[str, float]]  # one entry a step
    samples: list[Tensor]  # (B, T) int64 a generation: prompts and what was sampled after them
    seconds: float
    peak_bytes: int | None = None  # beyond what was held before the trainer was made


def train(
    setting: Setting,
    trainer: Callable[..., GRPOTrainer],
    task: Task,
    steps: int,
    samples: list[Tensor] | None = None,
) -> Run:
    """One run of one trainer class, from the same weights and seed as any other.

    Two micro-batches a step, two steps a generation, KL, a clip range that is reached.

    Args:
        samples: those of another run, to train on in place of sampling.
    """
    from transformers import set_seed

    options = {
        "use_cpu": not torch.cuda.is_available(),
        "loss_type": setting.loss_type,
        "importance_sampling_level": "sequence" if setting.loss_type == "luspo" else "token",
        "beta": 0.05,
        "epsilon": 0.05,
        "epsilon_high": 1.05 if setting.loss_type == "cispo" else 0.08,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "bf16": setting.precision == "bfloat16",
        "logging_steps": 1,
        "seed": SEED,
        **task.options,
        **(task.lora_options if setting.lora else {}),
        **setting.options,
    }
    found: list[Run] = []

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            set_seed(SEED)
            rank = task.lora_rank if setting.lora else None
            built = _trl_trainer(trainer, task, folder, steps, options, rank)
            sampled = watch_sampling(built.model, samples)
            start = time.perf_counter()
            built.train()
            seconds = time.perf_counter() - start
        history = [entry for entry in built.state.log_history if "loss" in entry]
        found.append(Run(history, sampled, seconds))

    memory = memory_of(run, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return replace(found[0], peak_bytes=memory.driver if memory.allocator is None else memory.allocator)


def watch_sampling(model: Any, samples: list[Tensor] | None) -> list[Tensor]:
    """The list fills with what `generate` returns, which is `samples`, one by one, where given."""
    sample = model.generate
    seen: list[Tensor] = []
    replayed = iter(samples or ())

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        result = sample(*args, **kwargs) if samples is None else next(replayed).to(model.device)
        seen.append(result.cpu())
        torch.manual_seed(SEED + len(seen))  # TRL shuffles next, and sampling drew what a replay did not
        return result

    model.generate = generate
    return seen


def _trl_trainer(
    kind: Callable[..., GRPOTrainer],
    task: Task,
    folder: str,
    steps: int,
    options: dict[str, Any],
    lora_rank: int | None = None,
) -> Any:
    """A trainer of the task that writes nothing and prints nothing, over float32 weights."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig

    trainer = kind(
        model=str(task.model),
        reward_funcs=task.reward,
        args=GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            model_init_kwargs={"dtype": "float32"},  # the masters; bf16 is TRL's autocast over them
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in task.prompts]),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        peft_config=lora_rank and LoraConfig(r=lora_rank, target_modules="all-linear"),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
