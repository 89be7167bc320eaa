"""How two histories of GRPO are compared."""

from __future__ import annotations

import math

import pytest

from benchmarks.trainers import differences


def test_a_difference_is_the_largest_over_the_steps_and_relative_above_one():
    a = [{"loss": 0.1, "kl": 20.0, "step_time": 1.0}, {"loss": 0.3, "kl": 0.5, "step_time": 2.0}]
    b = [{"loss": 0.1, "kl": 21.0, "step_time": 9.0}, {"loss": 0.1, "kl": 0.5, "step_time": 9.0}]

    assert differences(a, b) == pytest.approx({"loss": 0.2, "kl": 0.05})


@pytest.mark.parametrize(("other", "gap"), [(math.nan, 0.0), (None, 0.0), (1.0, math.inf)])
def test_a_number_that_one_trainer_has_and_the_other_not_is_infinitely_far(other, gap):
    assert differences([{"loss": math.nan}], [{"loss": other}]) == {"loss": gap}


def test_a_name_that_one_trainer_logs_alone_is_refused():
    with pytest.raises(ValueError, match=r"\['kl'\] is logged by one trainer only"):
        differences([{"loss": 1.0}], [{"loss": 1.0, "kl": 0.0}])
