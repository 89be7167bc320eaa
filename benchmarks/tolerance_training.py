"""`python -m benchmarks.tolerance_training`: what leaving out does to a training run.

A toy that learns to sort five digits is trained by GRPO from the same warm start with the certified backward
(`tolerance` default), the exact one (0) and full logits; the final rewards are set beside the spread over
seeds. `--model` takes the cosine of whole-model gradients, certified against full logits, on one batch of a
real model's own samples. On a CPU the head leaves out what its kernels would.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_fast import linear_grpo_loss
from grpo_fast.data import load_prompts
from grpo_fast.data.config import DatasetConfig
from grpo_fast.groups.advantages import group_advantages
from grpo_fast.head.plan import DEFAULT_TOLERANCE
from grpo_fast.policy import Policy, PolicyOptimizer, Sample, load_policy, pack
from grpo_fast.policy.config import ModelConfig, OptimizerConfig
from grpo_fast.rollout import Completion, Sampling
from grpo_fast.rollout.transformers import TransformersEngine

from .machine import environment
from .models import make_policy, make_tokenizer, vocabulary_of
from .record import write_json
from .step import LOSS, full_logits_loss

TOY = "sort"
VOCABULARY, STRIDE = vocabulary_of(TOY), 128  # 16 tiles; each of the task's symbols lies in one of its own
DIGITS, LENGTH = 10, 5
ARROW, END = STRIDE * DIGITS, VOCABULARY - 1
PROMPTS, GROUP, WARM_STEPS, WARM_BATCH = 16, 8, 150, 128
FULL, EXACT, CERTIFIED = "full logits", "tolerance 0", f"tolerance {DEFAULT_TOLERANCE:g}"
TOLERANCES = {FULL: None, EXACT: 0.0, CERTIFIED: DEFAULT_TOLERANCE}
Tokens = tuple[int, ...]


def make_toy(seed: int) -> Policy:
    policy = make_policy(ModelConfig(path=TOY, dtype="float32", device="cpu"), seed=seed)
    policy.tokenizer = make_tokenizer(VOCABULARY)
    return policy


def draw_prompt(chance: random.Random) -> Tokens:
    """Digits and an arrow."""
    return (*(STRIDE * chance.randrange(DIGITS) for _ in range(LENGTH)), ARROW)


def answer(prompt: Tokens) -> Tokens:
    """What should follow, the end with it."""
    return (*sorted(prompt[:LENGTH]), END)


def reward(prompt: Tokens, completion: Completion) -> float:
    """1 where all that follows the prompt is right."""
    return float(completion.token_ids == answer(prompt))


def warm_start(policy: Policy, chance: random.Random) -> None:
    """Supervised, on demonstrations of which a third are right: on-policy GRPO with an advantage of one."""
    optimizer = PolicyOptimizer(
        policy.trainable(), OptimizerConfig(learning_rate=1e-3, max_grad_norm=None), total_steps=WARM_STEPS
    )
    for _ in range(WARM_STEPS):
        samples = []
        for group_id in range(WARM_BATCH):
            prompt = draw_prompt(chance)
            wrong = (*chance.sample(prompt[:LENGTH], LENGTH), END)
            shown = answer(prompt) if chance.random() < 1 / 3 else wrong
            samples.append(Sample(prompt, shown, 1.0, group_id, (0.0,) * len(shown)))
        loss_of(FULL, policy, samples).backward()
        optimizer.step()


def sample(
    policy: Policy, prompts: Sequence[Tokens], group: int, max_tokens: int, seed: int
) -> list[list[Completion]]:
    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids)
    return engine.generate(prompts, group, Sampling(max_tokens, temperature=1.0, seed=seed))


def samples_of(
    prompts: Sequence[Tokens], groups: Sequence[Sequence[Completion]], advantages: Tensor
) -> list[Sample]:
    """With (prompts, group) advantages."""
    return [
        Sample(prompt, completion.token_ids, advantage, group_id, completion.logprobs)
        for group_id, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for completion, advantage in zip(group, advantages[group_id].tolist(), strict=True)
    ]


def loss_of(variant: str, policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """GRPO's, one update per sample: the ratio is one and its gradient the log-probability's."""
    tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
    (batch,) = pack(samples, max_tokens=tokens, device=policy.device)
    hidden, head = policy.hidden_states(batch), policy.head
    if variant == FULL:
        return full_logits_loss(head, hidden, batch)
    return linear_grpo_loss(
        hidden,
        head.weight,
        batch.targets,
        batch.advantages,
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
        config=LOSS,
        **replace(head, tolerance=TOLERANCES[variant]).options,
    ).loss


def gradient(variant: str, policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """All parameters' gradients in one vector."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss_of(variant, policy, samples), trained)
    return torch.cat([g.flatten().double() for g in found])


def difference(policy: Policy, samples: Sequence[Sample]) -> dict[str, float]:
    """Of the whole-model gradients with the certified backward and with full logits."""
    exact, certified = (gradient(variant, policy, samples) for variant in (FULL, CERTIFIED))
    cosine = torch.nn.functional.cosine_similarity(exact, certified, dim=0)
    relative = (exact - certified).norm() / exact.norm()
    return {"one_minus_cosine": 1 - cosine.item(), "relative": relative.item()}


def learn(
    policy: Policy,
    sampler: Callable[[], Policy],
    loss: Callable[[list[Sample]], Tensor],
    steps: int,
    seed: int,
) -> list[float]:
    """GRPO on what the sampler draws; mean rewards of every step."""
    chance = random.Random(seed)
    settings = OptimizerConfig(learning_rate=1e-4, betas=(0.9, 0.99), max_grad_norm=1.0)
    optimizer = PolicyOptimizer(policy.trainable(), settings, total_steps=steps)
    history = []
    for step in range(steps):
        prompts = [draw_prompt(chance) for _ in range(PROMPTS)]
        groups = sample(sampler(), prompts, GROUP, LENGTH + 1, seed=1000 * seed + step)
        pairs = list(zip(prompts, groups, strict=True))
        rewards = torch.tensor([[reward(prompt, found) for found in group] for prompt, group in pairs])
        loss(samples_of(prompts, groups, group_advantages(rewards).advantages)).backward()
        optimizer.step()
        history.append(rewards.mean().item())
    return history


def train(policy: Policy, variant: str, steps: int, seed: int) -> dict[str, Any]:
    """Mean rewards of every step, and of the last ten."""
    history = learn(policy, lambda: policy, partial(loss_of, variant, policy), steps, seed)
    return {"rewards": history, "final": statistics.mean(history[-10:])}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each variant the mean final reward over the seeds, and the seeds' range."""
    finals = {name: [run["final"] for run in of_seeds] for name, of_seeds in runs.items()}
    return {
        name: {"mean": statistics.mean(final), "low": min(final), "high": max(final)}
        for name, final in finals.items()
    }


def real_model(path: str) -> dict[str, Any]:
    """Gradient difference on one batch of a model's own samples, with advantages drawn at random.

    All of the model's weights take part, its tied head too.
    """
    policy = load_policy(ModelConfig(path=path, dtype="float32"))
    rows = load_prompts(DatasetConfig(source="reasoning_gym:chain_sum", size=2, seed=0), policy.tokenizer)
    prompts = [row.token_ids for row in rows]
    groups = sample(policy, prompts, group=6, max_tokens=24, seed=0)
    advantages = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    samples = samples_of(prompts, groups, advantages)
    tokens = sum(len(sample.completion_ids) for sample in samples)
    return {"model": path, "tokens": tokens, "float32": difference(policy, samples)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tolerance_training", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="0: only the real model (3)")
    parser.add_argument("--steps", type=int, default=100, help="of the toy (100)")
    parser.add_argument(
        "--model", help="also one batch of it: a folder, a hub id, or package:NAME for a GGUF"
    )
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    about = environment(torch.device("cpu"))
    found: dict[str, Any] = {"environment": about, "vocabulary": VOCABULARY, "steps": options.steps}
    if options.model:
        found["real_model"] = real_model(options.model)
        print(found["real_model"], flush=True)
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in TOLERANCES}
    for seed in range(options.seeds):
        start = make_toy(seed)
        warm_start(start, random.Random(seed))
        for variant, of_seeds in runs.items():
            of_seeds.append(train(copy.deepcopy(start), variant, options.steps, seed))
            print(f"seed {seed}, {variant}: {of_seeds[-1]['final']:.3f}", flush=True)
        found |= {"summary": summary(runs), "runs": runs}
        if options.json is not None:
            write_json(options.json, found)
    if options.json is not None:
        write_json(options.json, found)
    for variant, of in found.get("summary", {}).items():
        print(f"{variant:<12} {of['mean']:.3f}, {of['low']:.3f} to {of['high']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
