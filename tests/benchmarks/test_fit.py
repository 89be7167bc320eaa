from __future__ import annotations

import random

import pytest

from benchmarks.fit import fit_power_law


def test_a_power_law_is_found_exactly():
    law = fit_power_law([1, 2, 4, 8], [3, 12, 48, 192])

    assert law.exponent == pytest.approx(2)
    assert law.factor == pytest.approx(3)
    assert law.lower == pytest.approx(2) == law.upper


def test_the_interval_is_students():
    # Slope 1 on u = -1, 0, 1 (in logarithms), residuals a (1, -2, 1): one degree of freedom, sqrt(6 a² / 2).
    from math import exp, sqrt

    a = 0.01
    law = fit_power_law([exp(-1), 1, exp(1)], [exp(-1 + a), exp(-2 * a), exp(1 + a)])

    assert law.exponent == pytest.approx(1)
    assert law.upper - law.exponent == pytest.approx(12.706 * a * sqrt(6 / 2))


@pytest.mark.parametrize(("xs", "ys"), [([1, 2], [1, 2]), ([1, 1, 2], [1, 1, 2]), ([1, 2, 3], [0, 1, 2])])
def test_too_little_to_fit_gives_nothing(xs, ys):
    assert fit_power_law(xs, ys) is None


def test_the_order_of_the_points_does_not_matter():
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    generator = random.Random(seed)
    points = [(x, x**1.5 * generator.uniform(0.9, 1.1)) for x in (1, 2, 4, 8, 16)]
    shuffled = generator.sample(points, len(points))

    straight, mixed = (fit_power_law(*zip(*found, strict=True)) for found in (points, shuffled))

    assert straight.exponent == pytest.approx(mixed.exponent)
    assert straight.lower < straight.exponent < straight.upper
