"""Rows made to have the live tiles of a model's."""

from __future__ import annotations

import pytest
import torch

from benchmarks import rows
from benchmarks.problem import Setting
from benchmarks.rows import make_problem

CPU = torch.device("cpu")


def test_made_rows_thin_out_with_the_threshold_as_a_models_rows_do(seed, monkeypatch):
    """Of Qwen2.5-Coder-1.5B's: 3.3 times as many tiles hold a probability above 1e-6 as above 1e-5, 3.3 times
    fewer one above 1e-4, and a tile above 1e-5 holds 1.7 entries above. Independent normal logits of the
    spread that `peaked` has give 8, 9 and 1.05."""
    monkeypatch.setattr(rows, "live_tiles", lambda: (torch.tensor([18 / 500]), torch.tensor([1.0])))

    problem = make_problem(Setting("histogram", 64, 256, 64_000, "forward", True, "float32"), CPU, seed)

    p = (problem.hidden @ problem.weight.T).softmax(1).view(64, 500, 128)
    tiles = {threshold: float((p.amax(2) > threshold).float().mean()) for threshold in (1e-4, 1e-5, 1e-6)}
    entries = float((p > 1e-5).sum() / (p.amax(2) > 1e-5).sum())
    surprise = -p.flatten(1).gather(1, problem.targets[:, None]).log().mean()
    entropy = torch.special.entr(p).sum((1, 2)).mean()
    assert 0.1 < entropy < 2.5 and abs(surprise - entropy) < 0.7  # targets are sampled from the rows
    assert tiles[1e-5] == pytest.approx(18 / 500, rel=0.05)
    assert 2.2 < tiles[1e-6] / tiles[1e-5] < 5
    assert 2.2 < tiles[1e-5] / tiles[1e-4] < 6
    assert 1.3 < entries < 2.3
