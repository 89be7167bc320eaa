from __future__ import annotations

import random

import pytest


@pytest.fixture
def dice(seed: int) -> random.Random:
    """Of the test's seed."""
    return random.Random(seed)
