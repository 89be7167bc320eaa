"""Samplers of groups: orders, metrics, exact resuming, and what `groups describe` tells of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from grpo_fast.cli import main
from grpo_fast.data import LoadReport, PromptDataset, PromptSampler
from grpo_fast.data.config import DatasetConfig
from grpo_fast.groups.config import CurriculumConfig, GroupConfig
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.formation import form_groups
from grpo_fast.groups.sampler import GroupSampler, make_sampler

SIMILAR = GroupConfig(strategy="similarity", similarity_threshold=0.2, max_group_size=4)


@pytest.fixture
def make_sampler_of(make_prompts, seed):
    prompts = make_prompts(41)

    def make(batch_size: int = 8, config: GroupConfig = SIMILAR) -> GroupSampler:
        return GroupSampler(prompts, batch_size, form_groups(prompts, config), seed)

    return make


def draw(sampler: PromptSampler, batches: int) -> list[int]:
    return [prompt.index for _ in range(batches) for prompt in sampler.next()]


def test_every_epoch_has_every_prompt_once_and_the_prompts_of_a_group_follow_each_other(make_sampler_of):
    sampler = make_sampler_of(batch_size=41)
    epochs = [draw(sampler, 1), draw(sampler, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(p.index for p in sampler.dataset)
    assert epochs[0] != epochs[1]
    for group in sampler.grouping.members:
        places = sorted(epochs[1].index(sampler.dataset[position].index) for position in group)
        assert places == list(range(places[0], places[0] + len(group)))


@pytest.mark.parametrize("before", [0, 3, 7])
def test_a_resumed_sampler_goes_on_exactly_even_where_the_groups_would_form_otherwise(
    make_sampler_of, before
):
    original = make_sampler_of()
    draw(original, before)
    state = json.loads(json.dumps(original.state_dict()))
    resumed = make_sampler_of(config=SIMILAR.model_copy(update={"similarity_threshold": 0.9}))

    resumed.load_state_dict(state)

    assert draw(resumed, 9) == draw(original, 9)
    batch = original.next()
    assert resumed.baseline_groups(batch) == original.baseline_groups(batch)


def test_metrics_count_who_shares_and_how_far_apart_they_are(make_sampler_of):
    sampler = make_sampler_of(41)
    order = sampler.next()
    for batch in (order[:8], order[8:16], order[::6]):  # the last takes few prompts of a group
        baselines = sampler.baseline_groups(batch)

        metrics = sampler.metrics(batch)

        sharing = [p for p, own in zip(batch, baselines, strict=True) if baselines.count(own) > 1]
        assert metrics["groups/sharing"] == len(sharing) / len(batch)
        assert metrics["groups/prompts_per_baseline"] == len(batch) / len(set(baselines))
        spreads = []
        for own in set(baselines):
            places = [sampler.dataset.index(p) for p, b in zip(batch, baselines, strict=True) if b == own]
            spreads += [sampler.grouping.spread(places)] if len(places) > 1 else []
        assert metrics.get("groups/embedding_spread") == (pytest.approx(fmean(spreads)) if spreads else None)


def test_the_settings_choose_the_sampler_and_the_default_costs_nothing(make_prompts, seed):
    dataset = PromptDataset(tuple(make_prompts(9)), DatasetConfig(source="d"), LoadReport(9))

    def made(groups: GroupConfig, curriculum: CurriculumConfig | None = None) -> PromptSampler:
        return make_sampler(dataset, 4, groups, curriculum, ["r"], seed=seed)

    plain = made(GroupConfig())
    batch = plain.next()
    assert type(plain) is PromptSampler
    assert plain.baseline_groups(batch) is None and plain.metrics(batch) == {}
    assert type(made(SIMILAR)) is GroupSampler
    assert type(made(GroupConfig(), CurriculumConfig())) is DifficultySampler


def test_the_examples_of_the_configuration_are_no_part_of_a_conversation(seed, make_prompts):
    config = DatasetConfig(source="d", examples=[("e", "x")])
    shown = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "x"}]
    earlier = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    last = {"role": "user", "content": "go"}
    turns = [[*shown, *earlier, last], [*shown, *earlier, last], [*shown, last], [*shown, last]]
    prompts = tuple(replace(p, prompt=t) for p, t in zip(make_prompts(4), turns, strict=True))

    dataset = PromptDataset(prompts, config, LoadReport(4))
    sampler = make_sampler(dataset, 2, GroupConfig(strategy="prefix"), None, ["r"], seed=seed)

    assert sorted(sampler.grouping.members) == [(0, 1), (2,), (3,)]


TOPICS = ("w2 w3 w4", "w9 w10 w11", "w17 w18 w19")


@pytest.fixture
def config_file(toy: dict[str, Any], tmp_path: Path):
    rows = [{"prompt": f"{TOPICS[i % 3]} w{20 + i % 4}"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(**sections: Any) -> str:
        path = tmp_path / "run.yaml"
        dataset = {"source": str(tmp_path / "rows.jsonl")}
        path.write_text(yaml.safe_dump({**toy, "dataset": dataset, **sections}))
        return str(path)

    return write


def described(capsys, *arguments: str) -> str:
    assert main(["groups", "describe", *arguments]) == 0
    return capsys.readouterr().out


def test_describe_shows_sizes_likeness_and_examples(config_file, capsys):
    groups = {"strategy": "similarity", "similarity_threshold": 0.3}

    out = described(capsys, config_file(groups=groups), "--examples", "1")

    assert "12 prompts" in out and "strategy similarity" in out
    assert "3 groups; 100.0 % of the prompts" in out and "3 of size 4" in out
    assert "in steps of 4 prompts 100.0 % share a baseline, 4.00 prompts on average" in out
    likeness = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("mean similarity")]
    assert 0 < likeness[1] < likeness[0] < 1  # of any two prompts, and within groups
    assert out.count("group of 4 prompts, 24 completions, mean similarity") == 1
    shown = [line for line in out.splitlines() if line.startswith("  | ")]
    assert len(shown) == 4 and len({line[:12] for line in shown}) == 1
    of_three = config_file(groups=groups | {"max_group_size": 3})
    out = described(capsys, of_three, "prompts_per_step=12")
    assert "6 groups; 75.0 % of the prompts" in out and "12 prompts 75.0 % share a baseline, 2.00" in out


def test_describe_tells_of_nothing_shared_of_a_strategy_that_does_not_fit_and_of_each_stage(
    config_file, capsys
):
    stages = [
        {"name": "first", "steps": 2},
        {"name": "second", "steps": 2, "overrides": {"groups": {"strategy": "similarity"}}},
        {"name": "third", "overrides": {"loss": {"beta": 0.1}, "groups": {"strategy": "similarity"}}},
    ]
    assert "each prompt's 6 completions" in described(capsys, config_file())
    assert main(["groups", "describe", config_file(), "groups.strategy=prefix"]) == 1
    assert "use another strategy" in capsys.readouterr().err
    out = described(capsys, config_file(stages=stages))
    assert "stage first:" in out and "stage second:" in out and "stage third:" not in out
