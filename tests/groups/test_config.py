from __future__ import annotations

import pytest
from pydantic import ValidationError

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import ConfigError, dump_config, load_config
from grpo_fast.groups.config import AdaptiveWeightsConfig, AdvantageConfig, CurriculumConfig, GroupConfig

MINIMAL = {
    "model": {"path": "some/model"},
    "dataset": {"source": "rows.jsonl"},
    "rewards": [{"reward": "exact_match"}],
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "cluster"}, "choose one of prompt, similarity, prefix, combined, or give your own"),
        ({"similarity_threshold": 0.9}, "is not read by strategy = 'prompt'; leave it out"),
        ({"strategy": "prefix", "embedding": "a:b"}, "groups.embedding = 'a:b' is not read by"),
        ({"strategy": "a:b", "leftovers": "nearest"}, "is not read by strategy = 'a:b'"),
        ({"strategy": "combined"}, "criteria is empty.*such as {by: embedding}"),
        ({"strategy": "similarity", "min_group_size": 5}, "exceeds max_group_size = 4; raise max_group_size"),
        ({"strategy": "similarity", "similarity_threshold": 1.5}, "less than or equal to 1"),
        ({"strategy": "combined", "criteria": [{"by": "length", "weight": 0}]}, "greater than 0"),
    ],
)
def test_wrong_group_settings_are_refused_with_the_remedy(settings, message):
    with pytest.raises(ValidationError, match=message):
        GroupConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_edges": [0.8, 0.2]}, "must rise; order them"),
        ({"bucket_edges": [0.5]}, "bucket_weights has 3 entries for the 2 buckets .* give one each"),
        ({"bucket_weights": [1.0, 0.0, 1.0]}, "greater than 0"),
        ({"ramp_batches": 5}, "go together; set both or neither"),
        ({"final_bucket_weights": [1.0, 1.0], "ramp_batches": 5}, "final_bucket_weights has 2 entries"),
        ({"smoothing": 0}, "greater than 0"),
    ],
)
def test_wrong_curriculum_settings_are_refused_with_the_remedy(settings, message):
    with pytest.raises(ValidationError, match=message):
        CurriculumConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "target"}, "needs adaptive_weights.targets; give {reward: mean}"),
        ({"method": "inverse_std", "targets": {"a": 1.0}}, "reads no adaptive_weights.targets; remove them"),
        ({"method": "inverse_std", "min_factor": 2.0}, "less than or equal to 1"),
        ({"method": "inverse_std", "max_factor": 0.5}, "greater than or equal to 1"),
    ],
)
def test_wrong_adaptive_weights_are_refused_with_the_remedy(settings, message):
    with pytest.raises(ValidationError, match=message):
        AdaptiveWeightsConfig(**settings)


def test_normalising_then_summing_contradicts_no_scaling():
    with pytest.raises(ValidationError, match="set scale_rewards to group or batch"):
        AdvantageConfig(multi_objective_aggregation="normalize_then_sum", scale_rewards="none")


def test_a_curriculum_and_a_grouping_that_orders_prompts_contradict_each_other():
    with pytest.raises(ValidationError, match="keep one of them, or give them to different stages"):
        TrainConfig(**MINIMAL, curriculum={}, groups={"strategy": "similarity"})


def test_group_settings_survive_a_round_trip_and_take_overrides(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(TrainConfig(**MINIMAL)))
    overrides = ["groups.strategy=combined", "groups.criteria=[{by: 'column:level', weight: 2}]"]

    config = load_config(path, [*overrides, "curriculum=null", "groups.similarity_threshold=0.7"])
    path.write_text(dump_config(config))

    assert config.groups.criteria[0].weight == 2
    assert load_config(path, []) == config


def test_a_misspelt_key_is_named_with_the_nearest_one(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(TrainConfig(**MINIMAL)))
    with pytest.raises(ConfigError, match=r"did you mean groups\.similarity_threshold"):
        load_config(path, ["groups.similarity_treshold=0.7"])
