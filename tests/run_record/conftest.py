from __future__ import annotations

import random
from pathlib import Path

import pytest


@pytest.fixture
def dice(seed: int) -> random.Random:
    """Of the test's seed."""
    return random.Random(seed)


def exact_files(run_dir: Path) -> dict[str, bytes]:
    """What a resumed run must write as one that was never interrupted."""
    names = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "alerts.jsonl")
    return {name: (run_dir / name).read_bytes() for name in names}
