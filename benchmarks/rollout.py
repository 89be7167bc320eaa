"""`python -m benchmarks rollout`: an engine's cycle: generate, sleep, sync, wake.

Random weights, so that (almost) no completion ends before the limit: the work is known. Prompts have real
lengths. Tokens per second are of the whole cycle.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_fast.rollout import make_engine, sampling_of
from grpo_fast.rollout.config import RolloutConfig

from .contest import TOKENS, Contest, Entrant, Prepared
from .measure import Stopwatch
from .models import (
    LENGTHS,
    Architecture,
    add_model_arguments,
    chosen_models,
    load_lengths,
    make_policy,
    make_tokenizer,
)
from .peers import choose_names
from .session import add_common_arguments, check_common, positive, run_session

KIND = "rollout"
ENGINES = ("transformers", "vllm")
_USUAL = {"cuda": ENGINES, "cpu": ENGINES[:1]}  # vLLM on a CPU takes minutes to start: by --impl only
_MODELS = {"cuda": ("Qwen2.5-1.5B", "Qwen2.5-0.5B"), "cpu": ("SmolLM2-135M",)}
_SIZES = {"cuda": (32, 16, 512, None), "cpu": (2, 8, 24, 4)}  # prompts, group, completion, layers


@dataclass
class Rollout:
    """What is generated, and with what."""

    architecture: Architecture
    prompts: Sequence[Sequence[int]]
    group: int
    completion: int
    dtype: str
    device: torch.device
    seed: int
    options: dict[str, Any] = field(default_factory=dict)  # of RolloutConfig

    def prepare(self, engine_name: str) -> Prepared:
        """An awake engine around a policy of its own."""
        tokenizer = make_tokenizer(self.architecture.vocabulary)
        policy = make_policy(
            self.architecture, dtype=self.dtype, device=self.device, seed=self.seed, tokenizer=tokenizer
        )
        config = RolloutConfig(
            engine=engine_name,
            num_generations=self.group,
            max_completion_length=self.completion,
            **self.options,
        )
        longest = max(map(len, self.prompts)) + self.completion
        engine = make_engine(config, policy, max_length=longest)
        engine.__enter__()
        sampling = sampling_of(config, seed=self.seed)
        generated: list[int] = []

        def run(watch: Stopwatch) -> None:
            with watch.phase("generate"):
                groups = engine.generate(self.prompts, self.group, sampling)
            with watch.phase("sleep"):
                engine.sleep()
            with watch.phase("sync"):
                engine.sync(policy)
            with watch.phase("wake"):
                engine.wake()
            generated.append(sum(len(c.token_ids) for completions in groups for c in completions))

        def metrics(seconds: float) -> dict[str, float]:
            tokens = statistics.median(generated)
            return {TOKENS: tokens / seconds, "tokens": float(tokens)}

        return Prepared(run, metrics=metrics, close=lambda: engine.__exit__(None, None, None))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=9)
    add_model_arguments(parser, layers_on_cpu=4)
    parser.add_argument("--prompts", type=positive, help="of one call (32; on a CPU 2)")
    parser.add_argument("--group", type=positive, help="completions a prompt (16; on a CPU 8)")
    parser.add_argument("--completion", type=positive, help="tokens of a completion (512; on a CPU 24)")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", help="token counts, JSON; GSM8K's unless given"
    )


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    names = choose_names(list(ENGINES), options.impl) if options.impl else _USUAL[device.type]
    asked = (options.prompts, options.group, options.completion)
    *usual, layers = _SIZES[device.type]
    prompts, group, completion = (given or size for given, size in zip(asked, usual, strict=True))
    lengths = load_lengths(options.lengths or LENGTHS).draw(prompts, 1, options.seed)
    generator = random.Random(options.seed)
    bouts = []
    for architecture in chosen_models(options, _MODELS[device.type], layers):
        words = range(architecture.vocabulary - 2)
        rollout = Rollout(
            architecture,
            [generator.choices(words, k=length) for length, _ in lengths],
            group,
            completion,
            options.dtype,
            device,
            options.seed,
        )
        shape = {
            "model": architecture.name,
            "layers": architecture.layers,
            "prompts": prompts,
            "prompt_tokens": sum(length for length, _ in lengths),
            "group": group,
            "completion": completion,
            "dtype": options.dtype,
        }
        entrants = [Entrant(name, partial(rollout.prepare, name)) for name in names]
        bouts.append(Contest(shape, entrants, device, wall=True))
    return run_session(KIND, options, device, bouts)
