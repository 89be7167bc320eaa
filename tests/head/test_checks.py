"""Wrong arguments are named, with their value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from grpo_fast import linear_cross_entropy, linear_grpo_loss, linear_logprob


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
        ({"weight": torch.ones(0)}, ValueError, r"got shape \(0,\): gather it first where FSDP or ZeRO-3"),
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
        ({"topk": True}, ValueError, "topk must be a number of entries, 0 for none, got True"),
        ({"tolerance": -0.1}, ValueError, "tolerance must be 0"),
        ({"tolerance": "1"}, ValueError, "tolerance must be 0"),
        ({"softcap": "30"}, ValueError, "softcap must be a positive number"),
        ({"temperature": float("nan")}, ValueError, "temperature must be positive and finite, got nan"),
        ({"temperature": torch.tensor(0.7, requires_grad=True)}, ValueError, r"temperature\.detach\(\)"),
        ({"ignore_index": None}, TypeError, "ignore_index must be an integer, got None"),
        ({"outputs": None}, TypeError, "outputs must be a sequence of names, got None"),
        ({"process_group": "world"}, TypeError, "process_group must be a torch.distributed ProcessGroup"),
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
        ({"label_smoothing": "a little"}, "label_smoothing must lie in"),
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


def test_numbers_of_numpy_count_as_numbers(arguments):
    temperature = np.float32(0.5)

    out = linear_logprob(**arguments, temperature=temperature, logit_scale=np.float64(1.0))

    torch.testing.assert_close(out.logprob, linear_logprob(**arguments, temperature=0.5).logprob)


def test_shapes_can_be_asked_on_the_meta_device(arguments):
    out = linear_logprob(**{name: tensor.to("meta") for name, tensor in arguments.items()})

    assert out.logprob.shape == (6,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": [1.0]}, TypeError, r"hidden must be an \(N, H\) float tensor, got list"),
        ({"hidden": torch.ones(2, 3, 8)}, ValueError, r"hidden must be \(N, H\).* got shape \(2, 3, 8\)"),
        ({"advantages": None}, TypeError, "advantages must be .* float32 tensor, got NoneType"),
        ({"advantages": torch.ones(6, dtype=torch.int64)}, TypeError, "advantages .* got torch.int64"),
        (
            {"advantages": torch.ones(2)},
            ValueError,
            r"advantages .* got shape \(2,\).*values\[sequence_ids\]",
        ),
        (
            {"old_logprobs": torch.ones(6, device="meta")},
            ValueError,
            "old_logprobs is on meta, hidden on cpu",
        ),
        ({"loss_mask": torch.full((6,), 0.5)}, ValueError, "loss_mask must hold zeros and ones"),
        ({"sequence_ids": torch.zeros(6)}, TypeError, "sequence_ids must be .* int64 tensor"),
        ({"sequence_ids": torch.arange(6) - 1}, ValueError, "sequence_ids must lie in .* got -1 to 4"),
        ({"sequence_ids": torch.arange(6) % 2}, ValueError, "6 runs of 2 ids: sort the tokens"),
        ({"num_sequences": 1}, ValueError, r"sequence_ids must lie in \[0, num_sequences = 1\), got 0 to 1"),
        ({"num_sequences": -1}, ValueError, "num_sequences must be a count"),
        ({"config": "dapo"}, TypeError, r"such as GRPOLossConfig\('dapo'\), got 'dapo'"),
        ({"totals": 6}, TypeError, "totals must be a grpo_fast.StepTotals"),
    ],
)
def test_a_wrong_argument_of_the_policy_loss_is_named_with_its_value(arguments, change, error, message):
    batch = {"advantages": torch.ones(6), "sequence_ids": torch.tensor([0, 0, 0, 1, 1, 1])}

    with pytest.raises(error, match=message):
        linear_grpo_loss(**arguments | batch | change)


def test_a_distributed_tensor_is_refused_with_what_to_give(arguments, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        split = distribute_tensor(arguments["weight"], init_device_mesh("cpu", (1,)), [Shard(0)])

        with pytest.raises(TypeError, match=r"weight is a DTensor: give weight\.full_tensor\(\)"):
            linear_logprob(**arguments | {"weight": split})
    finally:
        dist.destroy_process_group()
