"""Contradictory settings of groups, curriculum, adaptive weights and advantages name the key."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from grpo_fast.config.groups import AdaptiveWeightsConfig, AdvantageConfig, CurriculumConfig, GroupConfig
from grpo_fast.config.keys import ConfigError
from grpo_fast.config.load import load_config

MINIMAL = ["model.path=some/model", "dataset.source=rows.jsonl", "rewards=[{reward: exact_match}]"]
GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
SIMILAR, COMBINED = {"strategy": "similarity"}, {"strategy": "combined"}


@pytest.mark.parametrize(
    ("section", "settings", "named"),
    [
        (GroupConfig, {"strategy": "cluster"}, "prompt, similarity, prefix, combined"),
        (GroupConfig, COMBINED, "criteria"),
        (GroupConfig, SIMILAR | {"min_group_size": 5}, "max_group_size = 4"),
        (GroupConfig, SIMILAR | {"similarity_threshold": 1.5}, "similarity_threshold"),
        (GroupConfig, COMBINED | {"criteria": [{"by": "length", "weight": 0}]}, "weight"),
        (CurriculumConfig, {"bucket_edges": [0.8, 0.2]}, "bucket_edges"),
        (CurriculumConfig, {"bucket_edges": [0.5]}, "bucket_weights has 3 entries for the 2"),
        (CurriculumConfig, {"bucket_weights": [1.0, 0.0, 1.0]}, "bucket_weights"),
        (CurriculumConfig, {"smoothing": 0}, "smoothing"),
        (AdaptiveWeightsConfig, {"method": "target"}, "needs adaptive_weights.targets"),
        (AdaptiveWeightsConfig, {"method": "inverse_std", "targets": {"a": 1.0}}, "reads no"),
        (AdaptiveWeightsConfig, {"method": "inverse_std", "min_factor": 2.0}, "min_factor"),
        (AdaptiveWeightsConfig, {"method": "inverse_std", "max_factor": 0.5}, "max_factor"),
        (AdvantageConfig, GDPO | {"scale_rewards": "batch"}, "scale_rewards = 'batch'"),
        (AdvantageConfig, GDPO | {"baseline": "leave_one_out"}, "baseline = 'leave_one_out'"),
        (AdvantageConfig, {"rescale_flat_groups": True, "dynamic_sampling": True}, "rescale_flat_groups"),
    ],
)
def test_a_contradiction_is_refused_and_names_the_key(section, settings, named):
    with pytest.raises(ValidationError, match=named):
        section(**settings)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["curriculum={}", "groups.strategy=similarity"], "curriculum"),
        (["groups.similarity_threshold=0.9"], "similarity_threshold = 0.9 is not read by .* = 'prompt'"),
        (
            ["groups.strategy=prefix", "groups.embedding=a:b"],
            "embedding = 'a:b' is not read",
        ),
        (["groups.strategy=a:b", "groups.prefix_turns=2"], "prefix_turns = 2 is not read by .* = 'a:b'"),
        (["groups.max_group_size=9"], "max_group_size = 9 is not read"),
    ],
)
def test_keys_that_another_strategy_reads_and_a_curriculum_beside_shared_baselines_are_refused(
    overrides, named
):
    with pytest.raises(ConfigError, match=named):
        load_config(None, [*MINIMAL, *overrides])
