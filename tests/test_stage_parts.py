"""The parts of each stage: what is made anew, what goes on, and mistakes told before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_fast.config import TrainConfig
from grpo_fast.data import load_prompts
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.sampler import GroupSampler
from grpo_fast.policy import load_tokenizer
from grpo_fast.run import build_stages
from grpo_fast.stages import resolve_stages
from grpo_fast.trainer import StageParts

OTHER = "def other(completions, **columns):\n    return [1.0] * len(completions)\n"


@pytest.fixture
def build(toy: dict[str, Any]):
    def build(*overrides: dict[str, Any], **changes: Any) -> tuple[StageParts, ...]:
        stages = [{"name": f"s{i}", "steps": 2, "overrides": part} for i, part in enumerate(overrides)]
        config = TrainConfig(**{**toy, "max_steps": 2 * len(stages), "stages": stages, **changes})
        tokenizer = load_tokenizer(config.model)
        held_out = load_prompts(config.evaluation.dataset, tokenizer)
        return build_stages(resolve_stages(config), tokenizer, held_out)

    return build


def test_what_a_stage_leaves_goes_on_as_the_same_object(build):
    first, second = build({}, {"loss": {"beta": 0.1}, "rollout": {"temperature": 0.7}})
    assert second.prompts is first.prompts and second.rewards is first.rewards
    assert second.stage.config.loss.beta == 0.1 and first.stage.config.loss.beta == 0


def test_other_rewards_keep_the_order_of_the_prompts_but_not_pass_rates_measured_by_the_old_ones(
    build, tmp_path: Path
):
    (tmp_path / "more.py").write_text(OTHER)
    rewards = {"rewards": [{"reward": f"{tmp_path / 'more.py'}:other"}]}
    plain, changed = build({}, rewards)
    assert changed.prompts is plain.prompts and changed.rewards.names == ("other",)

    measured, anew = build({}, rewards, curriculum={})
    assert isinstance(anew.prompts, DifficultySampler) and anew.prompts is not measured.prompts


def test_another_grouping_takes_the_same_prompts_in_another_order(build):
    first, second = build({}, {"groups": {"strategy": "similarity"}})
    assert isinstance(second.prompts, GroupSampler) and second.prompts.dataset is first.prompts.dataset
    assert second.prompts.seed != first.prompts.seed


def test_adaptive_weights_live_as_long_as_their_settings(build, tmp_path: Path):
    (tmp_path / "more.py").write_text(OTHER)
    rewards = {"rewards": [{"reward": f"{tmp_path / 'more.py'}:other"}]}
    adaptive = {"adaptive_weights": {"method": "inverse_std"}}
    parts = build({}, {"loss": {"beta": 0.1}}, rewards, {"adaptive_weights": None}, **adaptive)
    weights = [part.adaptive_weights for part in parts]
    assert weights[0] is weights[1] and weights[2] is not weights[1] and weights[3] is None


def test_a_first_stage_draws_exactly_as_a_run_without_stages(build, toy):
    (staged,) = build({})
    (plain,) = build_stages(
        resolve_stages(TrainConfig(**toy)),
        load_tokenizer(TrainConfig(**toy).model),
        load_prompts(TrainConfig(**toy).evaluation.dataset, load_tokenizer(TrainConfig(**toy).model)),
    )
    for _ in range(12):
        assert staged.prompts.next() == plain.prompts.next()


def test_held_out_questions_stay_out_of_every_stage(build, toy):
    held_out = {"dataset": {**toy["dataset"], "size": 4}}
    first, second = build({}, {"dataset": {"source": toy["dataset"]["source"]}}, evaluation=held_out)
    everything = load_prompts(TrainConfig(**toy).dataset, load_tokenizer(TrainConfig(**toy).model))
    questions = {prompt.prompt for prompt in everything[:4]}
    for parts in (first, second):
        left = {prompt.prompt for prompt in parts.prompts.dataset}
        assert left == {prompt.prompt for prompt in everything} - questions


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rewards": [{"reward": "exact_mach"}]}, "stage 's1': .*did you mean 'exact_match'"),
        ({"groups": {"strategy": "prefix"}}, "stage 's1': .*use another strategy"),
        ({"curriculum": {"pass_rate_column": "rate"}}, "stage 's1': .*is no column of the dataset"),
        ({"prompts_per_step": 1000}, "stage 's1': a batch of 1000 prompts cannot be drawn"),
    ],
)
def test_a_mistake_in_a_later_stage_is_told_at_the_start_with_its_name(build, overrides, message):
    with pytest.raises(ValueError, match=message):
        build({}, overrides)
