"""Wrong arguments raise errors that name them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from grpo_fast import linear_cross_entropy, linear_grpo_loss, linear_kl, linear_logprob

HEAD = {"hidden": torch.randn(6, 8), "weight": torch.randn(20, 8), "targets": torch.arange(6)}
ROW, NO_MASK, INTEGERS = torch.ones(6), torch.zeros(6).bool(), torch.zeros(20, 8, dtype=torch.int32)
POLICY = HEAD | {"advantages": ROW, "sequence_ids": torch.tensor([0, 0, 0, 1, 1, 1])}
KL = {name: HEAD[name] for name in ("hidden", "weight")}
KL |= {"mask": ~NO_MASK, "ref_hidden": torch.ones(6, 5), "ref_weight": torch.ones(20, 5)}
WRONG = {
    linear_logprob: (HEAD, {
        "hidden": [torch.ones(6, 8, dtype=torch.int64), torch.ones(6, 7)],
        "weight": [torch.ones(20), torch.ones(0, 8), torch.ones(0), INTEGERS, TwoTensor(*2 * [ROW])],
        "targets": [ROW, torch.arange(5)],
        "bias": [torch.ones(19)],
        "temperature": [0.0, float("nan"), torch.ones(5), torch.tensor(0.7, requires_grad=True)],
        "logit_scale": [-1.0],
        "softcap": [0.0, "30"],
        "outputs": [("entropie",), "entropy", None],
        "tolerance": [-0.1, "1"],
        "seed": [-1],
        "ignore_index": [None],
        "process_group": ["world"],
        "weight_gard": [None],
        "deterministic": [True],
        "topk": [3],
        "weight_grad": [
            INTEGERS, torch.zeros(2, 8), torch.zeros(8, 20).t(), torch.zeros(8).expand(20, 8)
        ],
    }),
    linear_cross_entropy: (HEAD, {
        "reduction": ["avg"], "label_smoothing": [1.5, "a little"], "z_loss": [-1.0],
    }),
    linear_grpo_loss: (POLICY, {
        "hidden": [[1.0], torch.ones(2, 3, 8)],
        "advantages": [None, torch.ones(6, dtype=torch.int64), torch.ones(2)],
        "old_logprobs": [torch.ones(6, device="meta")],
        "loss_mask": [torch.full((6,), 0.5)],
        "sequence_ids": [ROW, torch.arange(6) - 1, torch.arange(6) % 2],
        "num_sequences": [1, -1],
        "config": ["dapo"],
        "totals": [6],
        "entropy_coef": [-0.1],
    }),
    linear_kl: (KL, {
        "direction": ["backward"],
        "beta": [1.5],
        "topk": [0, 400],
        "mask": [ROW, NO_MASK[:5]],
        "ref_hidden": [None, torch.ones(6, 4), torch.ones(5, 5), torch.ones(6, 5).requires_grad_()],
        "ref_weight": [None, torch.ones(900, 5)],
        "ref_bias": [torch.ones(19)],
        "ref_temperature": [-1.0, -ROW],
        "ref_softcap": [0],
        "weight_grad": [None],
    }),
}  # fmt: skip
CASES = [
    pytest.param(function, name, value, id=f"{function.__name__}, {name} {index}")
    for function, (_, arguments) in WRONG.items()
    for name, values in arguments.items()
    for index, value in enumerate(values)
]


def refuses(function, given: dict[str, object], name: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        function(**given | {name: value})


@pytest.mark.parametrize(("function", "name", "value"), CASES)
def test_a_wrong_argument_is_named(function, name, value):
    given, _ = WRONG[function]

    function(**given)
    refuses(function, given, name, value)


@pytest.mark.parametrize("name", ["weight", "hidden", "bias"])
@pytest.mark.parametrize("where", ["cpu", "meta", "compiler"])
def test_a_weight_grad_in_the_memory_of_an_operand_is_refused(name, where):
    function = linear_logprob
    if where == "compiler":
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    device = "meta" if where == "meta" else "cpu"
    given = {key: value.to(device) for key, value in HEAD.items()} | {"bias": torch.ones(20, device=device)}
    buffer = torch.randn(21, 8, device=device)
    part = {"weight": buffer[1:], "hidden": buffer[:6], "bias": buffer[18:].view(-1)[:20]}[name]

    refuses(function, given | {name: part}, "weight_grad", buffer[:20])
    apart = torch.randn(40, 8, device=device)  # in one storage
    assert function(**given | {"weight": apart[:20]}, weight_grad=apart[20:]).logprob.shape == (6,)


@pytest.mark.parametrize(
    ("name", "value", "row"),
    [
        ("targets", torch.arange(6) + 15, 5),
        ("targets", torch.arange(6) - 1, 0),
        ("temperature", torch.tensor([1.0, 1, 1, -2, 1, 1]), 3),
    ],
)
def test_a_wrong_value_is_named_with_its_row(name, value, row):
    with pytest.raises(ValueError, match=rf"{name} .*row {row}\b"):
        linear_logprob(**HEAD | {name: value})


def test_a_weight_with_hooks_takes_no_gradient_in_place():
    weight = torch.ones(20, 8).requires_grad_()
    weight.register_hook(lambda gradient: gradient)

    refuses(linear_logprob, HEAD | {"weight": weight}, "weight_grad", torch.zeros(20, 8))


def test_a_custom_ignore_index_may_be_a_token():
    out = linear_logprob(**HEAD, ignore_index=3)

    assert out.logprob[3] == 0 and (out.logprob[[0, 1, 2, 4, 5]] < 0).all()


def test_an_unfinished_collective_and_numpy_numbers_are_arguments():
    expected = linear_logprob(**HEAD, temperature=0.5).logprob
    given = HEAD | {"weight": AsyncCollectiveTensor(HEAD["weight"]), "temperature": np.float32(0.5)}

    torch.testing.assert_close(linear_logprob(**given, logit_scale=np.float64(1.0)).logprob, expected)


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs"])
def test_a_column_with_a_graph_is_refused(name):
    column = ROW.clone().requires_grad_() * 2

    refuses(linear_grpo_loss, POLICY, name, column)
    with torch.no_grad():
        assert linear_grpo_loss(**POLICY | {name: column}).loss.isfinite()


def logprobs(hidden: torch.Tensor) -> torch.Tensor:
    return linear_logprob(hidden, torch.ones(20, 8), torch.arange(len(hidden))).logprob


def logprob(hidden: torch.Tensor) -> torch.Tensor:
    return logprobs(hidden).sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda hidden: torch.func.jvp(logprob, (hidden,), (hidden,)),
        lambda hidden: torch.compile(torch.func.jacfwd(logprob), backend="aot_eager")(hidden),
        torch.func.grad(logprob),
        torch.func.hessian(logprob),
        lambda hidden: torch.vmap(logprob)(hidden[None]),
        lambda hidden: torch.autograd.functional.hessian(logprob, hidden),
        lambda hidden: torch.autograd.functional.jacobian(logprobs, hidden, vectorize=True),
    ],
)
def test_all_but_first_derivatives_in_reverse_mode_is_refused(transform):
    with pytest.raises(NotImplementedError, match="first derivatives"):
        transform(HEAD["hidden"].clone())


def test_a_distributed_tensor_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        split = distribute_tensor(HEAD["weight"], init_device_mesh("cpu", (1,)), [Shard(0)])

        refuses(linear_logprob, HEAD, "weight", split)
    finally:
        dist.destroy_process_group()
