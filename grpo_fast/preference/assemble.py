"""A preference or ranking run's parts, as its configuration names them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_fast.data import PromptSampler, exclude_overlap
from grpo_fast.policy import PolicyOptimizer, load_policy
from grpo_fast.preference.comparison import Comparison
from grpo_fast.preference.data import load_comparisons, load_questions
from grpo_fast.preference.reference import reference_logprobs
from grpo_fast.preference.trainer import PreferenceTrainer

if TYPE_CHECKING:
    from grpo_fast.config import TrainConfig


def build_preference_trainer(config: TrainConfig) -> PreferenceTrainer:
    """Every part that the configuration names, at step 0, with the reference's log-probabilities at hand.

    Raises:
        ValueError: the configuration contradicts the model or the data.
    """
    policy = load_policy(config.model)
    prompts = load_questions(config.dataset, policy.tokenizer, config)
    load = partial(load_comparisons, tokenizer=policy.tokenizer, config=config, end_ids=policy.eos_token_ids)
    held_out: tuple[Comparison, ...] = ()
    if config.evaluation.dataset is not None:
        questions = load_questions(config.evaluation.dataset, policy.tokenizer, config)
        prompts = exclude_overlap(prompts, questions)
        held_out = with_order(load(questions, held_out=True).values())
    comparisons = load(prompts)
    section = config.preference
    needed = section.ranking.needs_reference if config.algorithm == "rank" else section.loss.needs_reference
    reference = {}
    if needed:
        folder = None if section.reference_cache is None else Path(section.reference_cache).expanduser()
        reference = reference_logprobs(
            policy, comparisons, max_tokens=config.micro_batch_tokens, folder=folder
        )
    return PreferenceTrainer(
        config,
        policy=policy,
        optimizer=PolicyOptimizer(policy.trainable(), config.optimizer, total_steps=config.max_steps),
        prompts=PromptSampler(prompts, config.prompts_per_step, seed=config.seed),
        comparisons=comparisons,
        reference=reference,
        held_out=held_out,
    )


def with_order(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Those that say which completion is better: a group that is all ties agrees with every order.

    Raises:
        ValueError: none is left.
    """
    ordered = tuple(comparison for comparison in comparisons if len(set(comparison.grades)) > 1)
    if not ordered:
        raise ValueError(
            "evaluation.dataset: all responses of every group tie; there is no order to agree with"
        )
    return ordered
