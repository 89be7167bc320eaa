"""What follows from many sizes: fitted exponents, and the density where the exact backward overtakes."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.__main__ import main
from benchmarks.crossover import crossover, multiplied
from benchmarks.goals import EXACT
from benchmarks.live_tiles import Histogram
from benchmarks.measure import Spread
from benchmarks.problem import PRODUCT
from benchmarks.record import Measurement, read
from benchmarks.scaling import fit_power_law
from benchmarks.tables import OURS


def at(factor: float, density: float, ours: float, exact: float) -> list[Measurement]:
    def one(name: str, ms: float) -> Measurement:
        return Measurement(name, {"factor": factor}, time=Spread(ms, ms, ms, 3), metrics={"density": density})

    return [one(OURS, ours), one(EXACT, exact)]


def test_the_crossover_lies_between_the_measured_densities():
    found = crossover([*at(8, 0.3, 40, 30), *at(1, 0.02, 15, 30), *at(4, 0.1, 20, 30)])

    assert [one.metrics for one in found] == [{"crossover_density": pytest.approx(0.2)}]


def test_where_leaving_out_always_pays_or_was_not_measured_there_is_none():
    late = Measurement(EXACT, {"factor": 9}, status="skipped", reason="no time left")

    assert crossover(at(1, 0.02, 15, 30)) == crossover([*at(1, 0.02, 15, 30), late]) == []


def test_a_rows_live_tiles_are_multiplied_up_to_all_there_are():
    wanted = Histogram("a model", 1280, {1: 3, 2: 2, 4: 1})  # of 10 tiles

    assert multiplied(wanted, 0.5).rows_by_live_tiles == {1: 5, 2: 1}
    assert multiplied(wanted, 3).rows_by_live_tiles == {3: 3, 6: 2, 10: 1}


def test_a_run_measures_each_density_with_every_way_through_the_head(tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--tokens", "16", "--hidden", "16", "--vocab", "300", "--repeats", "3"]

    assert main(["crossover", *sizes, "--factors", "1", "9", "--device", "cpu", "--json", str(out)]) == 0

    record = read(out)
    assert record.kind == "crossover"
    assert [(cell.shape["factor"], cell.implementation) for cell in record.cells if cell.time] == [
        (factor, name) for factor in (1, 9) for name in (PRODUCT, OURS, EXACT)
    ]


def test_a_factor_that_leaves_nothing_is_named(capsys):
    assert main(["crossover", "--factors", "0", "--device", "cpu"]) == 2
    assert "--factors" in capsys.readouterr().err


def test_a_power_law_is_found_exactly_whatever_the_order():
    points = random.sample([(1, 3), (2, 12), (4, 48), (8, 192)], 4)

    assert fit_power_law(*zip(*points, strict=True)) == (pytest.approx(2), pytest.approx(0, abs=1e-6))


def test_the_interval_is_students():
    # Slope 1 on u = -1, 0, 1 (in logarithms), residuals a (1, -2, 1): one degree of freedom, sqrt(6 a² / 2).
    a = 0.01
    ys = [math.exp(-1 + a), math.exp(-2 * a), math.exp(1 + a)]

    found = fit_power_law([math.exp(-1), 1, math.exp(1)], ys)

    assert found == (pytest.approx(1), pytest.approx(12.706 * a * math.sqrt(6 / 2)))


@pytest.mark.parametrize(("xs", "ys"), [([1, 2], [1, 2]), ([1, 1, 2], [1, 1, 2]), ([1, 2, 3], [0, 1, 2])])
def test_too_little_to_fit_gives_nothing(xs, ys):
    assert fit_power_law(xs, ys) is None
