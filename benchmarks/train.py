"""`python -m benchmarks train`: whole training steps, phase by phase, of our trainer and of TRL's.

Both start from the same random weights and prompts and train on what they sample, with the same engine. They
take turns, a few steps at a time; the first step of each turn warms up and does not count. Learning is not
compared here: the completions are of the longest length, the reward counts words.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any

import torch

from .architectures import ARCHITECTURES, architecture_of
from .cell import Limits
from .contest import TOKENS
from .failures import LATE, OK, failure_of
from .record import STATUS, Measurement
from .rollout import ENGINES
from .session import add_common_arguments, check_common, choose_names, positive, run_session
from .timing import Memory, memory_of, summarise
from .train_runs import IMPLEMENTATIONS, RUNS, Assets, StepTime, TrainSetting

KIND = "train"
_MODELS = {"cuda": ("Qwen2.5-0.5B",), "cpu": ("toy",)}
_SIZES = {"cuda": (16, 16, 96, 512, 16_384), "cpu": (2, 4, 16, 16, 512)}


class TrainBout:
    """The trainers on one setting, in turns of a few steps."""

    def __init__(
        self,
        shape: dict[str, Any],
        setting: TrainSetting,
        names: list[str],
        device: torch.device,
        *,
        steps: int,
        turns: int,
    ) -> None:
        self.shape = shape
        self._setting = setting
        self._device = device
        self._steps = steps
        self._turns = turns
        self._found: dict[str, list[StepTime]] = {name: [] for name in names}
        self._memory: dict[str, Memory] = {}
        self._failures: dict[str, tuple[str, str]] = {}

    def measure(self, limits: Limits) -> None:
        assets = Assets(self._setting)
        try:
            for _ in range(self._turns):
                for name in self._found:
                    if not limits.passed and name not in self._failures:
                        self._turn(name, assets)
        finally:
            assets.close()

    def results(self) -> list[Measurement]:
        return [self._result(name, steps) for name, steps in self._found.items()]

    def _turn(self, name: str, assets: Assets) -> None:
        """One step to warm up, then those that count."""
        taken: list[StepTime] = []

        def run() -> None:
            for index, step in enumerate(RUNS[name](assets, 1 + self._steps, self._device)):
                if index:
                    taken.append(step)

        try:
            memory = memory_of(run, self._device)
        except Exception as error:
            self._failures[name] = failure_of(error)
            return
        finally:
            self._found[name] += taken
            gc.collect()  # a trainer holds itself in cycles, and the next one needs its memory
        self._memory[name] = memory  # of the last turn: the first imports libraries too

    def _result(self, name: str, steps: list[StepTime]) -> Measurement:
        state, reason = self._failures.get(name, (OK, "") if steps else (LATE, LATE))
        if state != OK:
            return Measurement(name, self.shape, STATUS[state], reason)
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
    device = check_common(options)
    names = choose_names(IMPLEMENTATIONS, options.impl)
    given = options.prompts, options.group, options.prompt, options.completion, options.micro_batch_tokens
    prompts, group, prompt, completion, budget = (
        value or usual for value, usual in zip(given, _SIZES[device.type], strict=True)
    )
    if group < 2:
        raise ValueError(f"--group must be at least 2 to compare completions, got {group}")
    bouts = []
    for model in options.model or _MODELS[device.type]:
        architecture = architecture_of(model, options.layers)
        setting = TrainSetting(
            architecture,
            prompts,
            group,
            prompt,
            completion,
            budget,
            options.dtype,
            options.seed,
            options.engine,
        )
        shape = {
            "model": model,
            "layers": architecture.layers,
            "prompts": prompts,
            "group": group,
            "prompt": prompt,
            "completion": completion,
            "micro_batch_tokens": budget,
            "engine": options.engine,
            "dtype": options.dtype,
        }
        bouts.append(TrainBout(shape, setting, names, device, steps=options.steps, turns=options.repeats))
    return run_session(KIND, options, device, bouts)
