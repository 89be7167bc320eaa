"""Wrong arguments are named, with their value."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import linear_cross_entropy, linear_logprob


@pytest.fixture
def arguments() -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.randn(6, 8),
        "weight": torch.randn(20, 8),
        "targets": torch.arange(6),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.ones(6, 8, dtype=torch.int64)}, TypeError, "hidden must be a float32"),
        ({"hidden": torch.ones(6, 7)}, ValueError, r"hidden must be \(..., H\), H = 8"),
        ({"weight": torch.ones(20)}, ValueError, r"weight must be \(V, H\)"),
        ({"weight": torch.ones(0, 8)}, ValueError, "weight must have entries"),
        ({"targets": torch.ones(6)}, TypeError, "targets must be an int64 tensor"),
        ({"targets": torch.arange(5)}, ValueError, "targets must have hidden's leading shape"),
        ({"targets": torch.arange(6) + 15}, ValueError, "row 5"),
        ({"targets": torch.arange(6) - 1}, ValueError, "row 0"),
        ({"bias": torch.ones(19)}, ValueError, r"bias must be \(V,\) = \(20,\)"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0.0"),
        ({"temperature": torch.tensor([1.0, 1, 1, -2, 1, 1])}, ValueError, "row 3"),
        ({"temperature": torch.ones(5)}, ValueError, "temperature must be a number or of the targets' shape"),
        ({"logit_scale": -1.0}, ValueError, "logit_scale must be a positive number, got -1.0"),
        ({"softcap": 0.0}, ValueError, "softcap must be a positive number, or None"),
        ({"outputs": ("entropie",)}, ValueError, "entropie"),
        ({"outputs": "entropy"}, ValueError, "sequence of names"),
        ({"topk": -1}, ValueError, "topk must be a number of entries"),
        ({"topk": 21}, ValueError, "topk must be at most the vocabulary of 20"),
        ({"tolerance": -0.1}, ValueError, "tolerance must be 0"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(arguments, change, error, message):
    with pytest.raises(error, match=message):
        linear_logprob(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "avg"}, "reduction must be 'mean', 'sum' or 'none', got 'avg'"),
        ({"label_smoothing": 1.5}, "label_smoothing must lie in"),
        ({"z_loss": -1.0}, "z_loss must be at least 0"),
    ],
)
def test_a_wrong_cross_entropy_option_is_named(arguments, change, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments, **change)


def test_a_custom_ignore_index_may_be_a_token(arguments):
    out = linear_logprob(**arguments, ignore_index=3)

    assert out.logprob[3] == 0
    assert (out.logprob[[0, 1, 2, 4, 5]] < 0).all()
