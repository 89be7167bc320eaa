"""The stages of a run: what they share, what they train on, and mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_fast.config.rewards import RewardConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.stages import resolve_stages
from grpo_fast.data import load_prompts
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.sampler import GroupSampler
from grpo_fast.loop.trainer import StageParts
from grpo_fast.policy import load_policy, load_tokenizer
from grpo_fast.policy.load import end_at_turns
from grpo_fast.rewards import load_rewards
from grpo_fast.run.build import build_stages, warn_of_special_tokens
from grpo_fast.run.loader import Loader


@pytest.fixture
def build(toy: dict[str, Any]):
    def build(*overrides: dict[str, Any], **changes: Any) -> tuple[StageParts, ...]:
        stages = [{"name": f"s{i}", "steps": 2, "overrides": part} for i, part in enumerate(overrides)]
        config = TrainConfig(**{**toy, "max_steps": 2 * max(1, len(stages)), "stages": stages, **changes})
        return build_stages(resolve_stages(config), Loader(config))

    return build


def test_what_a_stage_leaves_unchanged_goes_on_as_the_same_object(build, tmp_path: Path):
    (tmp_path / "more.py").write_text(
        "def other(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    rewards = {"rewards": [{"reward": f"{tmp_path / 'more.py'}:other"}]}
    own = {"adaptive_weights": {"targets": {"other": 0.5}}}
    grouped = {"groups": {"strategy": "similarity"}, "adaptive_weights": None}

    first, second, third, fourth = build(
        {}, {"loss": {"beta": 0.1}}, rewards | own, grouped, adaptive_weights={"targets": {"near_w7": 0.5}}
    )

    assert second.prompts is first.prompts and second.rewards is first.rewards
    assert second.adaptive_weights is first.adaptive_weights is not None
    assert second.stage.config.loss.beta == 0.1 and first.stage.config.loss.beta == 0
    # Other rewards keep the order of the prompts.
    assert third.prompts is first.prompts and third.rewards.names == ("other",)
    assert third.adaptive_weights is not first.adaptive_weights and fourth.adaptive_weights is None
    # Another grouping takes the same prompts in another order.
    assert isinstance(fourth.prompts, GroupSampler) and fourth.prompts.dataset is first.prompts.dataset
    assert fourth.prompts.seed != first.prompts.seed
    # Pass rates belong to the rewards that measured them.
    measured, anew = build({}, rewards, curriculum={})
    assert isinstance(anew.prompts, DifficultySampler) and anew.prompts is not measured.prompts


def test_a_first_stage_samples_exactly_as_a_run_without_stages(build):
    (staged,), (plain,) = build({}), build()
    for _ in range(12):
        assert staged.prompts.next() == plain.prompts.next()


def test_held_out_questions_stay_out_of_every_stage(build, toy):
    held_out = {"dataset": {**toy["dataset"], "size": 4}}
    stages = build({}, {"dataset": {"source": toy["dataset"]["source"]}}, evaluation=held_out)
    everything = load_prompts(TrainConfig(**toy).dataset, load_tokenizer(TrainConfig(**toy).model))
    questions = {prompt.prompt for prompt in everything[:4]}
    for parts in stages:
        left = {prompt.prompt for prompt in parts.prompts.dataset}
        assert left == {prompt.prompt for prompt in everything} - questions


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rewards": [{"reward": "exact_mach"}]}, "did you mean 'exact_match'"),
        ({"groups": {"strategy": "prefix"}}, "use another strategy"),
        ({"curriculum": {"pass_rate_column": "rate"}}, "is no column of the dataset"),
        ({"prompts_per_step": 1000}, "a batch of 1000 prompts cannot be sampled"),
    ],
)
def test_a_mistake_in_a_later_stage_is_named_with_the_stage(build, overrides, message):
    with pytest.raises(ValueError, match=f"stage 's1': .*{message}"):
        build({}, overrides)


def test_the_end_of_a_turn_ends_completions_and_special_tags_are_said(toy: dict[str, Any], caplog):
    config = TrainConfig(**{**toy, "rollout": {"stop": ["</answer>"], "max_completion_length": 9}})
    policy = load_policy(config.model)
    tokenizer = policy.tokenizer
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>", "</answer>"]})
    tokenizer.add_tokens(["<|over|>"])
    turn, answer = tokenizer.convert_tokens_to_ids(["<|turn|>", "</answer>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"
    end_at_turns(policy.base_model, tokenizer)
    assert {turn, tokenizer.eos_token_id} <= {*policy.eos_token_ids} and answer not in policy.eos_token_ids
    assert "ends a turn with '<|turn|>'" in caplog.text
    policy.base_model.generation_config.eos_token_id.append(tokenizer.convert_tokens_to_ids("<|over|>"))
    patterns = {"tag_format": {}, "regex_format": {"pattern": r".*<\|turn\|><\|over\|>"}}
    rewards = load_rewards([RewardConfig(reward=name, options=given) for name, given in patterns.items()])
    warn_of_special_tokens(policy, config, rewards)
    assert "'regex_format': '<|turn|>' is a special token of the tokenizer and is cut from" in caplog.text
    assert "'regex_format': '<|over|>' is an end token of the tokenizer and is cut from" in caplog.text
    for place in ("reward 'tag_format'", "rollout.stop"):
        assert f"{place}: '</answer>' is a special token of the tokenizer and is found" in caplog.text
