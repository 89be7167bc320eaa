"""The order of the cells, and the goals against a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from benchmarks.accuracy import Accuracy
from benchmarks.cell import Cell, Result
from benchmarks.goals import is_goal, verdicts
from benchmarks.grid import cells, default_grid
from benchmarks.losses import LOGPROB, LOSSES
from benchmarks.problem import Setting
from benchmarks.timing import Memory, Spread


def test_a_gpu_measures_the_goals_of_the_design_first():
    settings = cells(default_grid("cuda", ("histogram", "peaked", "flat")), None)

    goals = [is_goal(setting) for setting in settings]
    assert sum(goals) == 3 + 1 + 3  # trainable, frozen at H = 2048, forward
    assert all(goals[:7])
    assert (settings[0].hidden, settings[0].trainable, settings[0].mode) == (2048, True, "forward_backward")
    assert len(settings) == len(set(settings)) == 3 * 3 * (64 + 3)  # sizes, and the other losses at the first


def test_the_losses_after_the_first_are_measured_at_the_first_sizes_unless_asked_for():
    usual = default_grid("cpu", ("peaked",))
    asked = replace(usual, losses=LOSSES, losses_at_all_sizes=True)

    found, all_sizes = cells(usual, None), cells(asked, None)

    sizes = {loss: {s.vocabulary for s in found if s.loss == loss} for loss in LOSSES}
    assert sizes == {loss: {4096, 8000} if loss == LOGPROB else {4096} for loss in LOSSES}
    assert {(s.loss, s.vocabulary) for s in all_sizes} == set(product(LOSSES, (4096, 8000)))


def test_real_rows_have_the_shape_of_their_model_alone():
    settings = cells(default_grid("cpu", ("real",)), (90, 24))

    assert {(setting.vocabulary, setting.hidden) for setting in settings} == {(90, 24)}


def test_a_goal_is_stated_for_log_probabilities_alone():
    setting = Setting("histogram", 16_384, 2048, 151_936, "forward_backward", True, "bfloat16")

    assert [is_goal(replace(setting, loss=loss)) for loss in LOSSES] == [True, False, False, False]


def test_a_goal_is_met_missed_or_not_measured():
    setting = Setting("histogram", 16_384, 2048, 151_936, "forward_backward", True, "bfloat16")
    vendors = Spread(15.0, 14.9, 15.1, 9)
    ours = Result(
        "ours",
        "ok",
        time=Spread(18.75, 18.7, 18.8, 9),
        memory=Memory(900 << 20, None),
        accuracy=Accuracy(4e-6, 2e-3, 3e-3),
    )

    found = {v.what: v for v in verdicts([Cell(setting, "", 1, 700 << 20, vendors, [ours])])}

    assert str(found["H = 2048, certified"]).endswith("goal ≤ 1.2×, found 1.25×: missed by 4.2%")  # noqa: RUF001
    assert found["H = 2048, memory beyond the results"].met
    assert found["H = 2048, worst |Δlogp|"].met
    assert not found["H = 2048, relative dW"].met
    assert found["H = 4096, certified"].found is None
    assert "not measured" in str(found["H = 2048, exact"])
