"""`python -m benchmarks train`: whole training steps, phase by phase, of our trainer and of TRL's.

Both start from the same random weights and prompts and train on what they sample, with the same engine. They
take turns, a few steps at a time; the first step of each turn warms up and does not count. Learning is not
compared here: the completions are of the longest length, the reward counts digits.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .contest import TOKENS, Limits, medians
from .measure import NO_TIME, OK, SKIPPED, Memory, Stopwatch, failure_of, memory_of, summarise
from .models import Defaults, save_model, vocabulary_of
from .peers import choose_names
from .record import Measurement
from .rollout import ENGINES
from .session import add_common_arguments, check_common, positive, run_session
from .trainers import in_phase, random_prompts, share_of_digits, trl_trainer

KIND = "train"
DEFAULTS = Defaults(
    ("Qwen2.5-0.5B",),
    "toy",
    cpu_layers=None,
    sizes={
        "prompts": (16, 2, "of a step"),
        "group": (16, 4, "completions a prompt"),
        "prompt": (96, 16, "tokens of a prompt"),
        "completion": (512, 16, "tokens of a completion at most"),
        "micro_batch_tokens": (16_384, 512, "of a forward and backward"),
    },
)
GENERATE, REWARD, UPDATE, PREPARE = "generate", "reward", "update", "log-probabilities and padding"
_TRL_PHASES = {
    "_generate_single_turn": GENERATE,
    "_calculate_rewards": REWARD,
    "_generate_and_score_completions": PREPARE,
    "training_step": UPDATE,
}
_LEARNING_RATE = 1e-6
_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class TrainShape:
    """What is trained, and what a step samples and trains on."""

    model: str  # an architecture's name
    layers: int
    prompts: int
    group: int
    prompt: int  # tokens
    completion: int  # tokens at most
    micro_batch_tokens: int
    engine: str  # "transformers" or "vllm", in the trainer's process, for both
    dtype: str
    seed: int

    def all_prompts(self) -> tuple[str, ...]:
        vocabulary = vocabulary_of(self.model)
        return random_prompts(16 * self.prompts, self.prompt, vocabulary, self.seed)


StepTime = tuple[float, dict[str, float], float]
"""Of one training step: seconds, those of each phase, tokens sampled."""


def ours_steps(model: Path, setting: TrainShape, steps: int, device: torch.device) -> Iterator[StepTime]:
    """Steps of our trainer, with its own clock."""
    from grpo_fast.config import TrainConfig
    from grpo_fast.run.build import build_grpo_trainer

    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in setting.all_prompts()))
        config = TrainConfig.model_validate(
            {
                "output_dir": f"{folder}/run",
                "seed": setting.seed,
                "max_steps": steps,
                "prompts_per_step": setting.prompts,
                "micro_batch_tokens": setting.micro_batch_tokens,
                "model": {"path": str(model), "dtype": setting.dtype, "device": device.type},
                "dataset": {"source": str(prompts), "chat": False},
                "rewards": [{"reward": f"{share_of_digits.__module__}:{share_of_digits.__name__}"}],
                "rollout": {
                    "engine": setting.engine,
                    "num_generations": setting.group,
                    "max_completion_length": setting.completion,
                },
                "loss": {"loss_type": "dapo", "epsilon_low": _CLIP_LOW, "epsilon_high": _CLIP_HIGH},
                "advantage": {"skip_flat_groups": False},
                "optimizer": {"learning_rate": _LEARNING_RATE},
            }
        )
        trainer, watch = build_grpo_trainer(config), Stopwatch(device, wall=True)
        with trainer.engine:
            for _ in range(steps):
                watch.start()
                result = trainer.train_step()
                seconds, _ = watch.stop()
                phases = {name.removeprefix("time/"): spent for name, spent in result.timings.items()
                          if name.startswith("time/") and name != "time/step"}  # fmt: skip
                length = result.metrics["completion/length_mean"]
                yield seconds, phases, length * setting.prompts * setting.group


def trl_steps(model: Path, setting: TrainShape, steps: int, device: torch.device) -> Iterable[StepTime]:
    """Steps of TRL's GRPOTrainer, told by its callbacks; phases by the methods that do them.

    TRL's loop cannot be left between steps, so all of them are run before the first is handed on.
    """
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    watch = Stopwatch(device, wall=True)
    times: list[tuple[float, dict[str, float]]] = []

    class Clock(TrainerCallback):
        update = ExitStack()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.start()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.update.enter_context(watch.phase(UPDATE))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.update.close()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(watch.stop())

    batch = setting.prompts * setting.group
    fitting = max(1, setting.micro_batch_tokens // (setting.prompt + setting.completion))
    at_once = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= fitting)
    options = {
        "max_steps": steps,
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": batch // at_once,
        "num_generations": setting.group,
        "max_completion_length": setting.completion,
        "loss_type": "dapo",
        "epsilon": _CLIP_LOW,
        "epsilon_high": _CLIP_HIGH,
        "beta": 0.0,
        "learning_rate": _LEARNING_RATE,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": setting.dtype == "bfloat16",
        "use_vllm": setting.engine == "vllm",
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": setting.engine == "vllm" and device.type == "cuda",
        "use_cpu": device.type == "cpu",
        "seed": setting.seed,
        "logging_steps": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(
            GRPOTrainer, folder, model, prompts=setting.all_prompts(), reward=share_of_digits, **options
        )  # fmt: skip
        trainer.add_callback(Clock())
        for name, phase in _TRL_PHASES.items():
            setattr(trainer, name, in_phase(getattr(trainer, name), watch, phase))
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    return [(*taken, length * batch) for taken, length in zip(times, lengths, strict=True)]


STEPS: dict[str, Callable[[Path, TrainShape, int, torch.device], Iterable[StepTime]]] = {
    "ours": ours_steps,
    "TRL": trl_steps,
}


@dataclass
class TrainBout:
    """The trainers on one model, in turns of a few steps."""

    setting: TrainShape
    device: torch.device
    names: list[str]
    steps: int  # of a turn that count
    turns: int
    _found: dict[str, list[StepTime]] = field(default_factory=dict)
    _memory: dict[str, Memory] = field(default_factory=dict)
    _failures: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def shape(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.setting).items() if name != "seed"}

    def measure(self, limits: Limits) -> None:
        setting = self.setting
        with tempfile.TemporaryDirectory() as folder:
            try:
                save_model(Path(folder), setting.model, setting.layers, setting.dtype, setting.seed)
            except Exception as error:  # no memory or disk for the model
                self._failures = dict.fromkeys(self.names, failure_of(error))
            for _ in range(self.turns):
                for name in self.names:
                    if not limits.passed and name not in self._failures:
                        self._turn(name, Path(folder))

    def _turn(self, name: str, model: Path) -> None:
        """One step to warm up, then those that count."""
        taken: list[StepTime] = []
        try:  # the memory is the last turn's: the first imports, too
            self._memory[name] = memory_of(
                lambda: taken.extend(STEPS[name](model, self.setting, 1 + self.steps, self.device)),
                self.device,
            )
        except Exception as error:
            self._failures[name] = failure_of(error)
        finally:
            self._found.setdefault(name, []).extend(taken[1:])
            gc.collect()  # a trainer holds itself in cycles, and the next one needs its memory

    def results(self) -> list[Measurement]:
        return [self._result(name, self._found.get(name, [])) for name in self.names]

    def _result(self, name: str, steps: list[StepTime]) -> Measurement:
        state, reason = self._failures.get(name, (OK, "") if steps else (SKIPPED, NO_TIME))
        if state != OK:
            return Measurement(name, self.shape, state, reason)
        seconds, phases, counts = map(list, zip(*steps, strict=True))
        tokens = statistics.median(counts)
        return Measurement(
            implementation=name,
            shape=self.shape,
            seconds=seconds,
            time=summarise(seconds),
            memory=self._memory.get(name),
            phases=medians(phases),
            metrics={TOKENS: tokens / statistics.median(seconds), "tokens": tokens},
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=3)
    DEFAULTS.add_arguments(parser)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="what generates (transformers)")
    parser.add_argument(
        "--steps", type=positive, default=3, help="steps of a turn that count (3); --repeats: turns"
    )


def main(options: argparse.Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = check_common(options)
    names = choose_names(list(STEPS), options.impl)
    sizes = DEFAULTS.chosen_sizes(options, device)
    if sizes["group"] < 2:
        raise ValueError(f"--group must be at least 2 to compare completions, got {sizes['group']}")
    bouts = [
        TrainBout(
            TrainShape(**model, **sizes, engine=options.engine, dtype=options.dtype, seed=options.seed),
            device,
            names,
            options.steps,
            options.repeats,
        )
        for model in DEFAULTS.chosen_models(options, device)
    ]
    return run_session(KIND, options, device, bouts)
