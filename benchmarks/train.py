"""`python -m benchmarks train`: whole training steps, phase by phase, of our trainer and of TRL's.

Both start from the same random weights and prompts and train on what they sample, with the same engine. They
take turns, a few steps at a time; the first step of each turn warms up and does not count. Learning is not
compared here: the completions are of the longest length, the reward counts digits.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from .contest import TOKENS, Limits
from .measure import NO_TIME, OK, SKIPPED, Memory, failure_of, memory_of, summarise
from .models import ARCHITECTURES, Architecture, architecture_of
from .peers import choose_names
from .record import Measurement
from .rollout import ENGINES
from .session import add_common_arguments, check_common, positive, run_session
from .train_runs import STEPS, StepSizes, StepTime
from .train_tasks import Task, random_task

KIND = "train"
_MODELS = {"cuda": ("Qwen2.5-0.5B",), "cpu": ("toy",)}
_SIZES = {"cuda": (16, 16, 96, 512, 16_384), "cpu": (2, 4, 16, 16, 512)}


class TrainBout:
    """The trainers on one model, in turns of a few steps."""

    def __init__(
        self,
        architecture: Architecture,
        sizes: StepSizes,
        names: list[str],
        device: torch.device,
        *,
        steps: int,
        turns: int,
    ) -> None:
        asked = {name: value for name, value in vars(sizes).items() if name != "seed"}
        self.shape: dict[str, Any] = {"model": architecture.name, "layers": architecture.layers} | asked
        self._architecture = architecture
        self._sizes = sizes
        self._device = device
        self._steps = steps
        self._turns = turns
        self._found: dict[str, list[StepTime]] = {name: [] for name in names}
        self._memory: dict[str, Memory] = {}
        self._failures: dict[str, tuple[str, str]] = {}

    def measure(self, limits: Limits) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                task = random_task(
                    Path(folder),
                    self._architecture,
                    self._sizes.dtype,
                    self._sizes.seed,
                    prompts=16 * self._sizes.prompts,
                    words=self._sizes.prompt,
                )
            except Exception as error:  # no memory or disk for the model
                self._failures = dict.fromkeys(self._found, failure_of(error))
            for _ in range(self._turns):
                for name in self._found:
                    if not limits.passed and name not in self._failures:
                        self._turn(name, task)

    def results(self) -> list[Measurement]:
        return [self._result(name, steps) for name, steps in self._found.items()]

    def _turn(self, name: str, task: Task) -> None:
        """One step to warm up, then those that count."""
        taken: list[StepTime] = []

        def run() -> None:
            for index, step in enumerate(STEPS[name](task, self._sizes, 1 + self._steps, self._device)):
                if index:
                    taken.append(step)

        try:
            self._memory[name] = memory_of(run, self._device)  # of the last turn: the first imports, too
        except Exception as error:
            self._failures[name] = failure_of(error)
        finally:
            self._found[name] += taken
            gc.collect()  # a trainer holds itself in cycles, and the next one needs its memory

    def _result(self, name: str, steps: list[StepTime]) -> Measurement:
        state, reason = self._failures.get(name, (OK, "") if steps else (SKIPPED, NO_TIME))
        if state != OK:
            return Measurement(name, self.shape, state, reason)
        seconds = [step.seconds for step in steps]
        names = {phase: None for step in steps for phase in step.phases}
        tokens = statistics.median(step.tokens for step in steps)
        return Measurement(
            implementation=name,
            shape=self.shape,
            seconds=seconds,
            time=summarise(seconds),
            memory=self._memory.get(name),
            phases={p: statistics.median(step.phases.get(p, 0.0) for step in steps) for p in names},
            metrics={TOKENS: tokens / statistics.median(seconds), "tokens": float(tokens)},
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=3)
    parser.add_argument(
        "--model", nargs="+", choices=ARCHITECTURES, help="those that suit the device, unless given"
    )
    parser.add_argument("--layers", type=positive, help="only so many of its layers")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="what generates (transformers)")
    parser.add_argument(
        "--steps", type=positive, default=3, help="steps of a turn that count (3); --repeats: turns"
    )
    parser.add_argument("--prompts", type=positive, help="of a step (16; on a CPU 2)")
    parser.add_argument("--group", type=positive, help="completions a prompt (16; on a CPU 4)")
    parser.add_argument("--prompt", type=positive, help="tokens of a prompt (96; on a CPU 16)")
    parser.add_argument(
        "--completion", type=positive, help="tokens of a completion at most (512; on a CPU 16)"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=positive, help="of a forward and backward (16384; CPU 512)"
    )


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = check_common(options)
    names = choose_names(list(STEPS), options.impl)
    given = options.prompts, options.group, options.prompt, options.completion, options.micro_batch_tokens
    prompts, group, prompt, completion, budget = (
        value or usual for value, usual in zip(given, _SIZES[device.type], strict=True)
    )
    if group < 2:
        raise ValueError(f"--group must be at least 2 to compare completions, got {group}")
    sizes = StepSizes(prompts, group, prompt, completion, budget, options.engine, options.dtype, options.seed)
    bouts = [
        TrainBout(
            architecture_of(model, options.layers),
            sizes,
            names,
            device,
            steps=options.steps,
            turns=options.repeats,
        )
        for model in options.model or _MODELS[device.type]
    ]
    return run_session(KIND, options, device, bouts)
