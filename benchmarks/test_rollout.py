"""A rollout engine's cycle: generate, sleep, sync, wake.

With random weights almost no completion ends before the limit. Tokens per second are of the whole cycle.
"""

from __future__ import annotations

import statistics

from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.rollout import make_engine, sampling_of

from . import models
from .conftest import DTYPE, ON_GPU
from .measure import Stopwatch

AXES = {
    "model": ("Qwen2.5-1.5B", "Qwen2.5-0.5B") if ON_GPU else ("SmolLM2-135M",),
    "dtype": [DTYPE],
    "peer": ("transformers", "vllm"),
}
ALLOWED = {"model": models.ARCHITECTURES}
SIZES = {  # on a GPU, on a CPU
    "layers": (0, 4),  # of the model at most; 0: all
    "prompts": (32, 2),  # of one call
    "group": (16, 8),  # completions a prompt
    "completion": (512, 24),  # tokens of a completion
}


def test_rollout(peer, model, dtype, device, sizes, seed, in_turns, benchmark):
    lengths = models.draw_lengths(sizes["prompts"], 1, seed)
    samples, _ = models.make_samples(lengths, 1, models.ARCHITECTURES[model][1]["vocab_size"], seed)
    prompts = [samples.prompt_of(row).tolist() for row in range(len(samples))]
    policy = models.make_policy(models.config_of(model, dtype, device), sizes.get("layers"), seed)
    group, limit = sizes["group"], sizes["completion"]
    config = RolloutConfig(engine=peer, num_generations=group, max_completion_length=limit)
    sampling, watch, tokens = sampling_of(config, seed=seed), Stopwatch(device), []
    with make_engine(config, policy, max_length=max(map(len, prompts)) + limit) as engine:

        def cycle() -> None:
            with watch.phase("generate"):
                groups = engine.generate(prompts, group, sampling)
            watch.phase("sleep")(engine.sleep)()
            watch.phase("sync")(engine.sync)(policy)
            watch.phase("wake")(engine.wake)()
            tokens.append(sum(len(one.token_ids) for completions in groups for one in completions))

        in_turns(cycle, watch=watch)
    benchmark.extra_info["tokens"] = statistics.median(tokens)
