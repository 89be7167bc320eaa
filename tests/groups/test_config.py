"""Contradictory settings of groups, curriculum, adaptive weights and advantages name the key."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from grpo_fast.config.groups import AdaptiveWeightsConfig, AdvantageConfig, CurriculumConfig, GroupConfig

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
        (AdaptiveWeightsConfig, {"targets": {}}, "targets"),
        (AdaptiveWeightsConfig, {"targets": {"a": 1.0}, "min_factor": 2.0}, "min_factor"),
        (AdaptiveWeightsConfig, {"targets": {"a": 1.0}, "max_factor": 0.5}, "max_factor"),
        (AdvantageConfig, GDPO | {"scale_rewards": "batch"}, "scale_rewards = 'batch'"),
        (AdvantageConfig, GDPO | {"baseline": "leave_one_out"}, "baseline = 'leave_one_out'"),
    ],
)
def test_a_contradiction_is_refused_and_names_the_key(section, settings, named):
    with pytest.raises(ValidationError, match=named):
        section(**settings)
