"""`python -m benchmarks.tolerance_training`: what a head's gradient drawn at random does to a training run.

A toy that learns to sort five digits, trained whole with its tied head, and SmolLM2 in the quickstart recipe,
its tied head frozen and trained. The gradient is exact, drawn without bias at the default tolerance and at
16, or, to compare, all below the threshold is left out. Recorded are the rewards of every step, the score of
held-out questions, and how far the head's weight went. On a CPU the head draws as its kernels do.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from grpo_fast import linear_grpo_loss
from grpo_fast.config_io import load_config
from grpo_fast.groups.advantages import group_advantages
from grpo_fast.head import reference, selection
from grpo_fast.head.plan import DEFAULT_TOLERANCE
from grpo_fast.policy import Policy, PolicyOptimizer, pack
from grpo_fast.policy.config import ModelConfig, OptimizerConfig
from grpo_fast.rollout import Completion, Sampling
from grpo_fast.rollout.transformers import TransformersEngine
from grpo_fast.run.build import build_grpo_trainer
from grpo_fast.table import Completions

from .machine import environment
from .models import make_policy, make_tokenizer, vocabulary_of
from .record import write_json
from .report import STYLE
from .step import LOSS, full_logits_loss

TOY = "sort"
VOCABULARY, STRIDE = vocabulary_of(TOY), 128  # 16 tiles; each of the task's symbols lies in one of its own
DIGITS, LENGTH = 10, 5
ARROW, END = STRIDE * DIGITS, VOCABULARY - 1
PROMPTS, GROUP, WARM_STEPS, WARM_BATCH = 16, 8, 150, 128
QUESTIONS = 256  # held out, of the toy
LEARNS = OptimizerConfig(learning_rate=1e-4, betas=(0.9, 0.99), max_grad_norm=1.0)
TASKS = TOY_TASK, FROZEN, TRAINED = ("toy", "quickstart, head frozen", "quickstart, head trained")
# Smaller steps than the recipe's own, and in float32: the head's gradient is then rounded nowhere else.
SMALLER = ("model.dtype=float32", "prompts_per_step=8", "evaluation.dataset.size=150")
EXACT = "exact"
ENDS: dict[str, Callable[[dict[str, Any]], float]] = {
    "score": itemgetter("after"),  # of held-out questions
    "reward": lambda run: fmean(run["rewards"]),  # of all steps
}
Tokens = tuple[int, ...]


class Dropping(selection.Selection):
    """The same threshold with nothing drawn: what is below it is left out, which is a bias."""

    def of_hidden(self, of_pairs: Tensor, part: slice, columns: slice) -> tuple[Tensor, Tensor]:
        nothing = of_pairs.new_zeros(())
        return of_pairs.index_put(self.small_entries(of_pairs, part, columns), nothing), nothing


@contextmanager
def dropping() -> Iterator[None]:
    """Heads on a CPU leave out what they would draw."""

    def select(*arguments: Any) -> Dropping:
        found = selection.select(*arguments)
        return Dropping(**vars(found) | {"scale": (found.scale == 1).to(found.scale)})

    with mock.patch.object(reference, "select", select):
        yield


def variants(task: str, tolerance: float) -> dict[str, tuple[float | None, bool]]:
    """The head's tolerance, None for full logits, and whether it drops."""
    found: dict[str, tuple[float | None, bool]] = {
        EXACT: (0.0, False),
        f"drawn, {tolerance:g}": (tolerance, False),
        "drawn, 16": (16.0, False),
        f"dropped, {tolerance:g}": (tolerance, True),
    }
    return {"full logits": (None, False), **found, "dropped, 16": (16.0, True)} if task == TOY_TASK else found


# The toy --------------------------------------------------------------------------------------------------


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
        rows = []
        for group_id in range(WARM_BATCH):
            prompt = draw_prompt(chance)
            wrong = (*chance.sample(prompt[:LENGTH], LENGTH), END)
            shown = answer(prompt) if chance.random() < 1 / 3 else wrong
            rows.append((prompt, shown, group_id))
        table = Completions.of(*zip(*rows, strict=True))
        table = table.with_columns(advantages=torch.ones(len(table.token_ids)))
        loss_of(None, policy, table).backward()
        optimizer.step()


def sample(
    policy: Policy, prompts: Sequence[Tokens], group: int, max_tokens: int, seed: int
) -> list[list[Completion]]:
    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids)
    return engine.generate(prompts, group, Sampling(max_tokens, temperature=1.0, seed=seed))


def samples_of(
    prompts: Sequence[Tokens], groups: Sequence[Sequence[Completion]], advantages: Tensor
) -> Completions:
    """With (prompts, group) advantages."""
    of_each = [number for number, group in enumerate(groups) for _ in group]
    drawn = [completion for group in groups for completion in group]
    table = Completions.of(
        [prompts[number] for number in of_each],
        [completion.token_ids for completion in drawn],
        of_each,
        sampler_logprobs=[completion.logprobs for completion in drawn],
    )
    return table.with_columns(advantages=table.spread(advantages.flatten()))


def loss_of(tolerance: float | None, policy: Policy, samples: Completions) -> Tensor:
    """GRPO's, one update per sample: the ratio is one and its gradient the log-probability's.

    Args:
        tolerance: of the head's gradient; None for full logits.
    """
    tokens = int((samples.prompt_lengths + samples.lengths).sum())
    (batch,) = pack(samples, max_tokens=tokens, device=policy.device)
    hidden, head = policy.hidden_states(batch), policy.head
    if tolerance is None:
        return full_logits_loss(head, hidden, batch)
    return linear_grpo_loss(
        hidden,
        head.weight,
        batch.targets,
        batch.columns["advantages"],
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
        config=LOSS,
        **replace(head, tolerance=tolerance).options,
    ).loss


def learn(
    policy: Policy,
    sampler: Callable[[], Policy],
    loss: Callable[[Completions], Tensor],
    steps: int,
    seed: int,
) -> list[float]:
    """GRPO on what the sampler draws; mean rewards of every step."""
    chance = random.Random(seed)
    optimizer = PolicyOptimizer(policy.trainable(), LEARNS, total_steps=steps)
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


def score(policy: Policy, questions: int) -> float:
    """Share of right answers at temperature 1, to questions that are the same for all."""
    chance = random.Random(-1)
    prompts = [draw_prompt(chance) for _ in range(questions)]
    answers = sample(policy, prompts, 4, LENGTH + 1, seed=0)
    pairs = zip(prompts, answers, strict=True)
    return fmean(reward(prompt, one) for prompt, of in pairs for one in of)


@lru_cache(maxsize=1)
def warm(seed: int) -> Policy:
    """The same for all variants of a seed."""
    policy = make_toy(seed)
    warm_start(policy, random.Random(seed))
    return policy


def train_toy(start: Policy, tolerance: float | None, steps: int, seed: int) -> dict[str, Any]:
    policy = copy.deepcopy(start)
    rewards = learn(policy, lambda: policy, partial(loss_of, tolerance, policy), steps, seed)
    moved = movement(start.head.weight, policy.head.weight, LEARNS.learning_rate)
    scores = {"before": score(start, QUESTIONS), "after": score(policy, QUESTIONS)}
    return {"rewards": rewards, **scores, **moved}


# SmolLM2 --------------------------------------------------------------------------------------------------


def train_quickstart(overrides: Sequence[str], before: float | None) -> dict[str, Any]:
    """The recipe with these keys changed.

    Args:
        before: the score that every run begins with, once it is known.
    """
    config = load_config("quickstart", overrides)
    torch.manual_seed(config.seed)
    trainer = build_grpo_trainer(config)
    start, begun = trainer.policy.head.weight.detach().clone(), time.perf_counter()
    before = trainer.evaluate().score if before is None else before
    rewards = [trainer.train_step().metrics["reward/mean"] for _ in range(config.max_steps)]
    after = trainer.evaluate()
    return {
        "rewards": rewards,
        "before": before,
        "after": after.score,
        "interval": after.interval,
        "seconds": time.perf_counter() - begun,
        **movement(start, trainer.policy.head.weight, config.optimizer.learning_rate),
    }


def movement(start: Tensor, end: Tensor, rate: float) -> dict[str, float]:
    """How far the head's weight has gone, in units of the learning rate: its words' root mean squares."""
    of_words = (end.detach() - start.detach()).square().mean(1).sqrt() / rate
    return {"moved_median": of_words.median().item(), "moved_mean": of_words.mean().item()}


# All of it ------------------------------------------------------------------------------------------------


def summary(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each task and variant means over its seeds, and how far they are from those of the exact gradient,
    seed by seed: seeds differ more than variants do. Errors are standard errors.
    """

    for (task, steps), arms in by_task(runs).items():
        exact = {run["seed"]: run for run in arms.get(EXACT, ())}
        yield from (
            {"task": task, "steps": steps, "variant": variant} | beside(arm, exact)
            for variant, arm in arms.items()
        )


def by_task(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, list[dict[str, Any]]]]:
    """Task and number of steps, then the variant."""
    found: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for run in sorted(runs, key=lambda run: (TASKS.index(run["task"]), len(run["rewards"]))):
        arms = found.setdefault((run["task"], len(run["rewards"])), {})
        arms.setdefault(run["variant"], []).append(run)
    return found


def beside(arm: list[dict[str, Any]], exact: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The runs of a variant beside those of the exact gradient, by seed."""
    pairs = [(run, exact[run["seed"]]) for run in arm if run["seed"] in exact]
    found: dict[str, Any] = {"seeds": len(arm), "moved": fmean(run["moved_mean"] for run in arm)}
    for name, value in ENDS.items():
        found[name] = fmean(map(value, arm))
        apart = [value(run) - value(other) for run, other in pairs]
        found[f"{name}_apart"] = fmean(apart) if apart else None
        found[f"{name}_error"] = stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
    return found


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The rewards of every step, means over the seeds, one panel a task, as SVG or whatever the path says.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--chart needs `pip install matplotlib`") from error
    tasks = by_task(runs)
    with rc_context(STYLE):
        figure = Figure(figsize=(4.0 * len(tasks), 3.4), layout="constrained")
        panels = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axes, ((task, steps), arms) in zip(panels, tasks.items(), strict=True):
            for variant, arm in arms.items():
                curves = zip(*(run["rewards"] for run in arm), strict=True)
                axes.plot(range(1, steps + 1), [fmean(step) for step in curves], label=variant)
            axes.set(title=task, xlabel="step", ylabel="mean reward")
            axes.legend(fontsize="small")
        figure.savefig(path)


def train(task: str, tolerance: float | None, steps: int, seed: int, before: float | None) -> dict[str, Any]:
    if task == TOY_TASK:
        return train_toy(warm(seed), tolerance, steps, seed)
    head = (f"model.head_tolerance={tolerance}", f"model.train_lm_head={task == TRAINED}")
    return train_quickstart((*SMALLER, *head, f"seed={seed}", f"max_steps={steps}"), before)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tolerance_training", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="(all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="(0 to 4)")
    parser.add_argument("--steps", type=int, nargs=2, default=[60, 12], help="toy's, quickstart's (60 12)")
    parser.add_argument("--tolerance", type=float, default=DEFAULT_TOLERANCE, help="(%(default)g)")
    parser.add_argument("--json", type=Path, help="has every finished run; what it has is not run again")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="the curves; `pip install matplotlib`")
    options = parser.parse_args(arguments)
    path, runs = options.json, []
    if path is not None and path.exists():
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    done = {(run["task"], run["variant"], run["seed"], len(run["rewards"])) for run in runs}
    about = {"environment": environment(torch.device("cpu")), "quickstart": SMALLER}
    wanted = (
        (task, variant, seed, *how)
        for seed in options.seeds
        for task in options.tasks
        for variant, how in variants(task, options.tolerance).items()
    )
    for task, variant, seed, tolerance, drops in wanted:
        steps = options.steps[task != TOY_TASK]
        if (task, variant, seed, steps) in done:
            continue
        before = next((run["before"] for run in runs if run["task"] != TOY_TASK), None)
        with dropping() if drops else nullcontext():
            found = train(task, tolerance, steps, seed, before)
        runs.append({"task": task, "variant": variant, "seed": seed} | found)
        print(f"{task}, {variant}, seed {seed}: {found['before']:.3f} to {found['after']:.3f}", flush=True)
        if path is not None:
            write_json(path, about | {"tolerance_training": [*summary(runs)], "runs": runs})
    for row in summary(runs):
        print(row)
    if options.chart is not None:
        draw(runs, options.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
