"""Wrong arguments are named, with their value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from grpo_fast import linear_cross_entropy, linear_grpo_loss, linear_logprob


@pytest.fixture
def arguments() -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.randn(6, 8),
        "weight": torch.randn(20, 8),
        "targets": torch.arange(6),
    }


FLOATS = torch.ones(6)


def refuses(function, given: dict[str, object], name: str, value: object, error: type[Exception]) -> None:
    """The argument is refused by its name."""
    with pytest.raises(error, match=rf"\b{name}\b"):
        function(**given | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("hidden", torch.ones(6, 8, dtype=torch.int64), TypeError),
        ("hidden", torch.ones(6, 7), ValueError),
        ("weight", torch.ones(20), ValueError),
        ("weight", torch.ones(0, 8), ValueError),
        ("weight", torch.ones(0), ValueError),
        ("targets", FLOATS, TypeError),
        ("targets", torch.arange(5), ValueError),
        ("bias", torch.ones(19), ValueError),
        ("temperature", 0.0, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", torch.ones(5), ValueError),
        ("temperature", torch.tensor(0.7, requires_grad=True), ValueError),
        ("logit_scale", -1.0, ValueError),
        ("softcap", 0.0, ValueError),
        ("softcap", "30", ValueError),
        ("outputs", ("entropie",), ValueError),
        ("outputs", "entropy", TypeError),
        ("outputs", None, TypeError),
        ("tolerance", -0.1, ValueError),
        ("tolerance", "1", ValueError),
        ("ignore_index", None, TypeError),
        ("process_group", "world", TypeError),
        ("weight_gard", None, TypeError),
        ("deterministic", True, TypeError),
        ("held_back", None, TypeError),
        ("topk", 3, TypeError),
        ("weight_grad", torch.zeros(20, 8, dtype=torch.int32), TypeError),
        ("weight_grad", torch.zeros(2, 8), ValueError),
        ("weight_grad", torch.zeros(8, 20).t(), ValueError),
        ("weight_grad", torch.zeros(8).expand(20, 8), ValueError),
        ("weight", torch.ones(20, 8, dtype=torch.int8), TypeError),
        ("weight", TwoTensor(torch.ones(20, 8), torch.ones(20, 8)), TypeError),
    ],
)
def test_a_wrong_argument_is_named(arguments, name, value, error):
    refuses(linear_logprob, arguments, name, value, error)


@pytest.mark.parametrize("name", ["weight", "hidden", "bias"])
@pytest.mark.parametrize("where", ["cpu", "meta", "compiler"])
def test_a_weight_grad_in_the_memory_of_an_operand_is_refused(arguments, name, where):
    function = linear_logprob
    if where == "compiler":
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    buffer = torch.randn(47, 8, device="meta" if where == "meta" else "cpu")
    given = {key: value.to(buffer.device) for key, value in arguments.items()}
    given |= {"bias": buffer[40:].view(-1)[:20], "weight": buffer[20:40], "hidden": buffer[14:20]}
    starts = {"weight": 21, "hidden": 0, "bias": 27}

    refuses(function, given, "weight_grad", buffer[starts[name] :][:20], ValueError)
    assert function(**given, weight_grad=torch.empty_like(given["weight"])).logprob.shape == (6,)


@pytest.mark.parametrize(
    ("name", "value", "row"),
    [
        ("targets", torch.arange(6) + 15, 5),
        ("targets", torch.arange(6) - 1, 0),
        ("temperature", torch.tensor([1.0, 1, 1, -2, 1, 1]), 3),
    ],
)
def test_a_wrong_value_is_named_with_its_row(arguments, name, value, row):
    with pytest.raises(ValueError, match=rf"{name} .*row {row}\b"):
        linear_logprob(**arguments | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("reduction", "avg"), ("label_smoothing", 1.5), ("label_smoothing", "a little"), ("z_loss", -1.0)],
)
def test_a_wrong_cross_entropy_option_is_named(arguments, name, value):
    refuses(linear_cross_entropy, arguments, name, value, ValueError)


def test_a_weight_with_hooks_takes_no_gradient_in_place(arguments):
    arguments["weight"].requires_grad_().register_hook(lambda gradient: gradient)

    refuses(linear_logprob, arguments, "weight_grad", torch.zeros(20, 8), ValueError)


def test_a_custom_ignore_index_may_be_a_token(arguments):
    out = linear_logprob(**arguments, ignore_index=3)

    assert out.logprob[3] == 0
    assert (out.logprob[[0, 1, 2, 4, 5]] < 0).all()


def test_what_a_collective_is_still_gathering_is_a_weight(arguments):
    expected = linear_logprob(**arguments).logprob
    arguments["weight"] = AsyncCollectiveTensor(arguments["weight"])

    torch.testing.assert_close(linear_logprob(**arguments).logprob, expected)


def test_numbers_of_numpy_count_as_numbers(arguments):
    temperature = np.float32(0.5)

    out = linear_logprob(**arguments, temperature=temperature, logit_scale=np.float64(1.0))

    torch.testing.assert_close(out.logprob, linear_logprob(**arguments, temperature=0.5).logprob)


def test_shapes_can_be_asked_on_the_meta_device(arguments):
    out = linear_logprob(**{name: tensor.to("meta") for name, tensor in arguments.items()})

    assert out.logprob.shape == (6,)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("hidden", [1.0], TypeError),
        ("hidden", torch.ones(2, 3, 8), ValueError),
        ("advantages", None, TypeError),
        ("advantages", torch.ones(6, dtype=torch.int64), TypeError),
        ("advantages", torch.ones(2), ValueError),
        ("old_logprobs", torch.ones(6, device="meta"), ValueError),
        ("loss_mask", torch.full((6,), 0.5), ValueError),
        ("sequence_ids", FLOATS, TypeError),
        ("sequence_ids", torch.arange(6) - 1, ValueError),
        ("sequence_ids", torch.arange(6) % 2, ValueError),
        ("num_sequences", 1, ValueError),
        ("num_sequences", -1, ValueError),
        ("config", "dapo", TypeError),
        ("totals", 6, TypeError),
        ("entropy_coef", -0.1, ValueError),
    ],
)
def test_a_wrong_argument_of_the_policy_loss_is_named(arguments, name, value, error):
    batch = {"advantages": FLOATS, "sequence_ids": torch.tensor([0, 0, 0, 1, 1, 1])}

    refuses(linear_grpo_loss, arguments | batch, name, value, error)


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs"])
def test_a_column_with_a_graph_is_refused(arguments, name):
    given = arguments | {"advantages": FLOATS, "sequence_ids": torch.zeros(6, dtype=torch.int64)}
    column = FLOATS.clone().requires_grad_() * 2

    refuses(linear_grpo_loss, given, name, column, ValueError)
    with torch.no_grad():
        assert linear_grpo_loss(**given | {name: column}).loss.isfinite()


def logprobs(hidden: torch.Tensor) -> torch.Tensor:
    return linear_logprob(hidden, torch.ones(20, 8), torch.arange(len(hidden))).logprob


def logprob(hidden: torch.Tensor) -> torch.Tensor:
    return logprobs(hidden).sum()


def forward_mode(hidden: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        return logprob(torch.autograd.forward_ad.make_dual(hidden, hidden))


@pytest.mark.parametrize(
    "transform",
    [
        lambda hidden: torch.func.jvp(logprob, (hidden,), (hidden,)),
        lambda hidden: torch.compile(torch.func.jacfwd(logprob), backend="aot_eager")(hidden),
        torch.func.grad(logprob),
        torch.func.hessian(logprob),
        lambda hidden: torch.vmap(logprob)(hidden[None]),
        forward_mode,
        lambda hidden: torch.autograd.functional.hessian(logprob, hidden),
        lambda hidden: torch.autograd.functional.jacobian(logprobs, hidden, vectorize=True),
    ],
)
def test_all_but_first_derivatives_in_reverse_mode_is_refused(arguments, transform):
    with pytest.raises(NotImplementedError, match="first derivatives"):
        transform(arguments["hidden"])


def test_a_distributed_tensor_is_refused_with_what_to_give(arguments, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        split = distribute_tensor(arguments["weight"], init_device_mesh("cpu", (1,)), [Shard(0)])

        refuses(linear_logprob, arguments, "weight", split, TypeError)
    finally:
        dist.destroy_process_group()
