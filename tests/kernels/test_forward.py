"""The forward and finalizing kernels against float64 logits."""

from __future__ import annotations

import pytest
import torch
from grpo_fast.kernels import ProductTile
from grpo_fast.kernels.finalize import row_results
from grpo_fast.kernels.forward import TileStatistics, gather_rows, tile_statistics

from grpo_fast.head.call import HeadCall, RowStatistics

EVERY = ("entropy", "mean_logit", "max_logit", "log_sum_sq")
POINTERS = ProductTile(16, 128, 16, warps=4, stages=2, group=2, descriptors=False)
DESCRIPTORS = ProductTile(32, 256, 16, warps=4, stages=2, group=2, descriptors=True)


def run(call: HeadCall, *, wanted=EVERY, tile=DESCRIPTORS) -> tuple[TileStatistics, RowStatistics]:
    call = call._replace(**dict.fromkeys(wanted, True))
    gathered = gather_rows(call)
    tiles = tile_statistics(call, gathered, tile=tile)
    return tiles, RowStatistics(*row_results(tiles, call, gathered.target_logit))


def test_the_entropy_of_huge_logits_errs_no_more_than_their_rounding(device, rng):
    hidden, weight = torch.zeros(4, 16, device=device), torch.zeros(300, 16, device=device)
    bias = 1e4 + torch.rand(300, generator=rng).to(device)
    probability = bias.double().softmax(0)

    _, rows = run(HeadCall(hidden, weight, torch.zeros(4, dtype=torch.int64, device=device), bias))

    expected = -(probability * probability.log()).sum().float().expand(4)
    spacing_of_floats = 2.0**-10  # the log-sum-exp and the mean logit are each summed and rounded at it
    torch.testing.assert_close(rows.entropy, expected, rtol=0, atol=4 * spacing_of_floats)


def test_a_capped_logit_keeps_its_digits_from_near_zero_to_saturation(device, rng):
    hidden = 10 ** (6 * torch.rand(300, 1, generator=rng) - 3).to(device)
    sides = torch.tensor([[1.0], [-1.0]], device=device)
    targets = torch.randint(0, 2, (300,), generator=rng).to(device)

    _, rows = run(HeadCall(hidden, sides, targets, softcap=30.0), wanted=("max_logit",), tile=POINTERS)

    expected = 30 * (hidden.double() * sides[targets] / 30).tanh()
    torch.testing.assert_close(rows.target_logit.double(), expected[:, 0], rtol=5e-7, atol=0)


def test_tiles_of_minus_infinity_weigh_nothing(device, rng):
    hidden, weight = (torch.randn(n, 16, generator=rng).to(device) for n in (5, 400))
    bias = torch.zeros(400, device=device)
    bias[128:256] = -torch.inf
    targets = torch.tensor([0, 127, 128, 399, -1], device=device)

    tiles, rows = run(HeadCall(hidden, weight, targets, bias))

    expected = (hidden.double() @ weight.double().T + bias.double()).log_softmax(1)
    assert (tiles.lse[:4, 1] == -torch.inf).all()
    assert rows.logprob[2] == -torch.inf
    kept = torch.tensor([0, 1, 3], device=device)
    torch.testing.assert_close(
        rows.logprob[kept], expected[kept, targets[kept]].float(), rtol=1e-5, atol=1e-5
    )
    assert not any(getattr(rows, name).isnan().any() for name in ("logsumexp", "entropy", "log_sum_sq"))


def test_the_order_of_many_rows_is_that_of_those_with_work(device, rng):
    targets = torch.randint(-1, 1, (2500,), generator=rng).to(device)
    hidden = torch.randn(2500, 1, generator=rng).to(device)

    gathered = gather_rows(HeadCall(hidden, torch.ones(1, 1, device=device), targets))

    expected = (targets >= 0).nonzero().flatten()
    count = int(gathered.count)
    assert count == expected.numel()
    assert torch.equal(gathered.order[:count], expected)
    assert torch.equal(gathered.hidden[:count], hidden[expected])


def test_a_target_of_another_shard_has_no_logprob_but_a_log_sum_exp(make_head):
    head = make_head(20, 300, 40)
    elsewhere = torch.full_like(head.targets, 300)

    _, rows = run(head.call._replace(targets=elsewhere), wanted=())

    assert (rows.logprob == 0).all()
    torch.testing.assert_close(rows.logsumexp, head.logsumexp, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits_are_addressed(device, rng):
    rows, vocabulary = 70_000, 151_936
    hidden = torch.randn(rows, 64, generator=rng).to(device, torch.bfloat16)
    weight = torch.randn(vocabulary, 64, generator=rng).to(device, torch.bfloat16)
    targets = torch.randint(0, vocabulary, (rows,), generator=rng).to(device)

    _, results = run(
        HeadCall(hidden, weight, targets), wanted=(), tile=ProductTile(128, 256, 64, 8, 3, 16, True)
    )

    chosen = torch.tensor([0, 1, rows // 2, rows - 1], device=device)
    expected = (hidden[chosen].double() @ weight.double().T).log_softmax(1)
    expected = expected.gather(1, targets[chosen, None])[:, 0]
    torch.testing.assert_close(results.logprob[chosen], expected.float(), rtol=1e-5, atol=1e-4)
