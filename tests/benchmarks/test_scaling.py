"""What follows from many sizes: fitted exponents, and the density where the exact backward overtakes."""

from __future__ import annotations

import pytest

from benchmarks.crossover import crossover, multiplied
from benchmarks.goals import EXACT
from benchmarks.live_tiles import Histogram
from benchmarks.measure import OK, Spread
from benchmarks.problem import PRODUCT
from benchmarks.record import Measurement
from benchmarks.scaling import MODEL_CHECK, fit_power_law
from benchmarks.tables import OURS


def at(factor: float, density: float, ours: float, exact: float) -> list[Measurement]:
    def one(name: str, ms: float) -> Measurement:
        return Measurement(name, {"factor": factor}, time=Spread(ms, ms, ms, 3), metrics={"density": density})

    return [one(OURS, ours), one(EXACT, exact)]


def test_the_crossover_lies_between_the_measured_densities_where_there_is_one():
    found = crossover([*at(8, 0.3, 40, 30), *at(1, 0.02, 15, 30), *at(4, 0.1, 20, 30)])
    late = Measurement(EXACT, {"factor": 9}, status="skipped", reason="no time left")

    assert [one.metrics for one in found] == [{"crossover_density": pytest.approx(0.2)}]
    assert crossover(at(1, 0.02, 15, 30)) == crossover([*at(1, 0.02, 15, 30), late]) == []


def test_a_rows_live_tiles_are_multiplied_up_to_all_there_are():
    wanted = Histogram("a model", 1280, {1: 3, 2: 2, 4: 1})  # of 10 tiles

    assert multiplied(wanted, 0.5).rows_by_live_tiles == {1: 5, 2: 1}
    assert multiplied(wanted, 3).rows_by_live_tiles == {3: 3, 6: 2, 10: 1}


def test_a_power_law_is_found_whatever_the_order_and_needs_three_points():
    assert fit_power_law({4: 48, 1: 3, 8: 192, 2: 12}) == pytest.approx((2, 2, 2))
    assert fit_power_law({1: 1, 2: 2}) == ()
    exponent, low, high = fit_power_law({1: 1, 10: 11, 100: 99})
    assert low < exponent < high and low < 1 < high


def test_scaling_fits_an_exponent_along_each_axis_and_holds_the_memory_model_against_the_allocator(run):
    axes = ["--tokens", "16", "32", "64", "--vocab", "200", "400", "800", "--impl", "ours, reference"]

    record = run("scaling", *axes, "--at-tokens", "16", "--at-vocab", "200", "--hidden", "16")

    timed = [found.shape for found in record.cells if found.time and found.implementation != PRODUCT]
    assert [(shape["tokens"], shape["vocabulary"]) for shape in timed] == [
        *[(16, 200), (32, 200), (64, 200)],
        *[(16, 200), (16, 400), (16, 800)],
    ]
    fits = {
        one.shape["fit"]: one.metrics
        for one in record.cells
        if one.shape.get("fit") and one.implementation != MODEL_CHECK
    }
    for axis in ("tokens", "vocabulary"):
        found = fits[axis]
        assert found["time_exponent_lower"] <= found["time_exponent"] <= found["time_exponent_upper"]
    checks = [one for one in record.cells if one.implementation == MODEL_CHECK and "fit" not in one.shape]
    assert [(one.status, one.time) for one in checks] == [(OK, None)] * 6
    for one in checks:  # the operands' gradients alone are (N + V) x 16 float32 numbers
        least = 64 * (one.shape["tokens"] + one.shape["vocabulary"])
        assert min(one.metrics["predicted_bytes"], one.metrics["counted_bytes"]) >= least
