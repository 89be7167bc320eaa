"""A seeded source of random numbers, printed so that a failure can be repeated."""

from __future__ import annotations

import random

import pytest


@pytest.fixture
def dice() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return random.Random(seed)
