"""What shapes have in common, what tells them apart, and how they read."""

from __future__ import annotations

import math

import pytest

from benchmarks.record import Measurement
from benchmarks.shapes import is_wrong, label, number, shapes_of, slices, split_axes


def at(name: str = "ours", **shape: object) -> Measurement:
    return Measurement(name, shape)


def test_what_all_shapes_agree_on_is_said_once():
    cells = [
        at(tokens=64, dtype="float32"),
        at(tokens=128, dtype="float32"),
        at("TRL", tokens=64, dtype="float32"),
    ]

    constant, varying = split_axes(cells)

    assert constant == {"dtype": "float32"}
    assert varying == ["tokens"]
    assert shapes_of(cells) == [cells[0].shape, cells[1].shape]


def test_a_shape_reads_as_a_person_would_say_it():
    head = {
        "rows": "peaked",
        "tokens": 16_384,
        "mode": "forward_backward",
        "trainable": False,
        "dtype": "bfloat16",
    }

    assert label(head) == "peaked rows, N 16,384, forward + backward, frozen head, bfloat16"
    assert label(head | {"loss": "dpo"}, ["rows", "loss"]) == "peaked rows, DPO"
    assert label(head | {"mode": "forward"}, ["mode", "trainable"]) == "forward"
    assert label({"model": "toy", "lora": None, "checkpointing": False, "prompts": 4}) == "toy, prompts 4"
    assert label({"checkpointing": True, "memory_gib": 1.5}) == "checkpointing, memory gib 1.50"


@pytest.mark.parametrize(
    ("value", "text"),
    [(16_384, "16,384"), (18.0, "18.0"), (146.2, "146"), (0.01234, "0.0123"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_slices_vary_along_one_axis_alone_and_the_longest_comes_first():
    cells = [at(tokens=n, hidden=h) for n, h in ((64, 32), (128, 32), (64, 16), (64, 8), (256, 32))]

    by_tokens, by_hidden = slices(cells, "tokens"), slices(cells, "hidden")

    assert [part.fixed for part in by_tokens] == [{"hidden": 32}]
    assert len(by_tokens[0].cells) == 3
    assert [part.fixed for part in by_hidden] == [{"tokens": 64}]
    assert slices([at(mode="a"), at(mode="b")], "mode") == []


@pytest.mark.parametrize(
    "accuracy",
    [{"logprob": 0.2}, {"loss": 0.3}, {"hidden_gradient": math.nan}, {"weight_gradient": 0.5}],
)
def test_beyond_rounding_is_wrong(accuracy):
    assert is_wrong(Measurement("fast", {}, accuracy=accuracy))


def test_rounding_and_errors_of_another_kind_are_not():
    assert not is_wrong(Measurement("ours", {}, accuracy={"logprob": 1e-5, "perplexity": 3.0}))
