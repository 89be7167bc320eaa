"""A stretch of training steps by our trainer or TRL's, from the same weights, on the same prompts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .architectures import Architecture, make_policy, make_tokenizer
from .timing import synchronize
from .train_task import make_prompts, small_words, write_prompts

OURS, TRL = "ours", "TRL"
IMPLEMENTATIONS = (OURS, TRL)
GENERATE, REWARD, UPDATE, PREPARE = "generate", "reward", "update", "log-probabilities and padding"
_LEARNING_RATE = 1e-6
_CLIP = 0.2, 0.28


@dataclass(frozen=True)
class TrainSetting:
    """What is trained. The group's completions are of at most `completion` tokens."""

    architecture: Architecture
    prompts: int  # of a step
    group: int
    prompt: int  # words of a prompt, a token each
    completion: int
    micro_batch_tokens: int
    dtype: str
    seed: int
    engine: str = "transformers"  # or "vllm", in the trainer's process, for both


@dataclass(frozen=True)
class StepTime:
    """One training step."""

    seconds: float
    phases: dict[str, float]
    tokens: int  # sampled


class Assets:
    """Model, tokenizer and prompts on disk, made on first use; `close` removes them."""

    def __init__(self, setting: TrainSetting) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.root = Path(self._folder.name)
        self.setting = setting
        self._made = False

    @property
    def model(self) -> Path:
        self._make()
        return self.root / "model"

    @property
    def data(self) -> Path:
        self._make()
        return self.root / "prompts.jsonl"

    def scratch(self) -> Path:
        """A new folder for a run."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def close(self) -> None:
        self._folder.cleanup()

    def _make(self) -> None:
        if self._made:
            return
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        s = self.setting
        tokenizer = make_tokenizer(s.architecture.vocabulary)
        policy = make_policy(
            s.architecture, dtype=s.dtype, device=torch.device("cpu"), seed=s.seed, tokenizer=tokenizer
        )
        policy.save_pretrained(self.root / "model")
        prompts = make_prompts(16 * s.prompts, s.prompt, s.architecture.vocabulary, s.seed)
        write_prompts(prompts, self.root / "prompts.jsonl")
        self._made = True


def run_ours(assets: Assets, steps: int, device: torch.device) -> Iterator[StepTime]:
    """Steps of our trainer, with its own clock."""
    from grpo_fast.config import TrainConfig
    from grpo_fast.run import build_trainer

    s = assets.setting
    config = TrainConfig.model_validate(
        {
            "output_dir": str(assets.scratch()),
            "seed": s.seed,
            "max_steps": steps,
            "prompts_per_step": s.prompts,
            "micro_batch_tokens": s.micro_batch_tokens,
            "model": {"path": str(assets.model), "dtype": s.dtype, "device": device.type},
            "dataset": {"source": str(assets.data), "chat": False},
            "rewards": [{"reward": f"{__package__}.train_task:small_words"}],
            "rollout": {
                "engine": s.engine,
                "num_generations": s.group,
                "max_completion_length": s.completion,
            },
            "loss": {"loss_type": "dapo", "epsilon_low": _CLIP[0], "epsilon_high": _CLIP[1]},
            "advantage": {"skip_flat_groups": False},
            "optimizer": {"learning_rate": _LEARNING_RATE},
        }
    )
    trainer = build_trainer(config)
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
            tokens = sum(len(c.token_ids) for group in result.groups for c in group.completions)
            yield StepTime(seconds, phases, tokens)


def run_trl(assets: Assets, steps: int, device: torch.device) -> Iterator[StepTime]:
    """Steps of TRL's GRPOTrainer, told by its callbacks; phases by the methods that do them.

    TRL's loop cannot be left between steps, so all of them are run before the first is handed on.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_fast.run_record.jsonl import read_jsonl

    s = assets.setting
    found: list[StepTime] = []
    phases = _Phases(device)
    sampled = [0]

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            with phases(GENERATE):
                result = super()._generate_single_turn(*args, **kwargs)
            sampled[0] += sum(map(len, result[0]))
            return result

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            with phases(REWARD):
                return super()._calculate_rewards(*args, **kwargs)

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            with phases(PREPARE):
                return super()._generate_and_score_completions(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with phases(UPDATE):
                return super().training_step(*args, **kwargs)

    class Clock(TrainerCallback):
        start = 0.0
        optimizer_start = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            phases.seconds.clear()
            sampled[0] = 0
            self.start = time.perf_counter()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            self.optimizer_start = time.perf_counter()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            phases.add(UPDATE, time.perf_counter() - self.optimizer_start)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            found.append(StepTime(time.perf_counter() - self.start, dict(phases.seconds), sampled[0]))

    batch = s.prompts * s.group
    at_once = _divisor(batch, s.micro_batch_tokens // (s.prompt + s.completion))
    trainer = Timed(
        model=str(assets.model),
        reward_funcs=small_words,
        args=GRPOConfig(
            output_dir=str(assets.scratch()),
            max_steps=steps,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=batch // at_once,
            num_generations=s.group,
            max_completion_length=s.completion,
            loss_type="dapo",
            epsilon=_CLIP[0],
            epsilon_high=_CLIP[1],
            beta=0.0,
            learning_rate=_LEARNING_RATE,
            adam_beta2=0.95,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=s.dtype == "bfloat16",
            model_init_kwargs={"dtype": "float32"},  # the masters; bf16 is TRL's autocast over them
            use_vllm=s.engine == "vllm",
            vllm_mode="colocate",
            vllm_enable_sleep_mode=s.engine == "vllm" and device.type == "cuda",
            use_cpu=device.type == "cpu",
            seed=s.seed,
            logging_steps=steps + 1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": line["prompt"]} for line in read_jsonl(assets.data)]),
        processing_class=AutoTokenizer.from_pretrained(assets.model),
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    yield from found


RUNS: dict[str, Callable[[Assets, int, torch.device], Iterator[StepTime]]] = {OURS: run_ours, TRL: run_trl}


class _Phases:
    """Seconds by phase; an inner phase's do not count for the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._open: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        synchronize(self._device)
        start = time.perf_counter()
        self._open.append(name)
        try:
            yield
        finally:
            synchronize(self._device)
            spent = time.perf_counter() - start
            self._open.pop()
            self.add(name, spent)
            if self._open:
                self.add(self._open[-1], -spent)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def _divisor(batch: int, at_most: int) -> int:
    """The largest divisor of the batch within the bound; at least one."""
    return max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(1, at_most))
