"""Measure an engine's cycle: generate, sleep, sync, wake.

Weights are random, so that almost no completion ends before the limit. Prompts have real lengths. Tokens per
second are those of the whole cycle.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.rollout import make_engine, sampling_of

from . import models
from .contest import Entrant, Prepared, measure_in_turns
from .measure import Stopwatch
from .peers import choose
from .session import add_common_arguments, add_sizes, check_common, run_session, sizes_of

ENGINES = ("transformers", "vllm")
_USUAL = {"cuda": ENGINES, "cpu": ENGINES[:1]}  # vLLM on a CPU takes minutes to start: by --impl only
SIZES = {
    "prompts": (32, 2, "of one call"),
    "group": (16, 8, "completions a prompt"),
    "completion": (512, 24, "tokens of a completion"),
}


def prepare(
    model: ModelConfig, layers: int, seed: int, prompts: Sequence[Sequence[int]], config: RolloutConfig
) -> Prepared:
    """Start an engine around a policy of its own."""
    policy = models.make_policy(model, layers, seed)
    longest = max(map(len, prompts)) + config.max_completion_length
    engine = make_engine(config, policy, max_length=longest)
    engine.__enter__()
    sampling = sampling_of(config, seed=seed)
    generated: list[int] = []
    metrics: dict[str, float] = {}

    def run(watch: Stopwatch) -> None:
        with watch.phase("generate"):
            groups = engine.generate(prompts, config.num_generations, sampling)
        with watch.phase("sleep"):
            engine.sleep()
        with watch.phase("sync"):
            engine.sync(policy)
        with watch.phase("wake"):
            engine.wake()
        generated.append(sum(len(c.token_ids) for completions in groups for c in completions))
        metrics["tokens"] = float(statistics.median(generated))

    return Prepared(run, metrics, close=lambda: engine.__exit__(None, None, None))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=9)
    models.add_models(parser, ["Qwen2.5-1.5B", "Qwen2.5-0.5B"], ["SmolLM2-135M"], cpu_layers=4)
    add_sizes(parser, SIZES)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    names = choose(list(ENGINES), options.impl) if options.impl else _USUAL[options.device]
    lengths = models.draw_lengths(options.prompts, 1, options.seed)
    bouts = []
    for model, shape in models.chosen_models(options):
        samples, _ = models.make_samples(lengths, 1, models.vocabulary_of(model.path), options.seed)
        prompts = [samples.prompt_of(row).tolist() for row in range(len(samples))]
        common = (model, shape["layers"], options.seed, prompts)
        entrants = []
        for name in names:
            config = RolloutConfig(
                engine=name, num_generations=options.group, max_completion_length=options.completion
            )
            entrants.append(Entrant(name, partial(prepare, *common, config)))
        tokens = sum(map(len, prompts))
        shape |= {**sizes_of(options, SIZES), "prompt_tokens": tokens, "dtype": options.dtype}
        bouts.append((shape, partial(measure_in_turns, shape, entrants, device)))
    return run_session(options, bouts)
