"""The vocabulary split over two processes gives what one process gives."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from grpo_fast import linear_cross_entropy, linear_logprob

OUTPUTS = ("logprob", "entropy", "logsumexp", "mean_logit", "argmax_is_target", "log_sum_sq_probs")
SPLIT = 130  # of 300: the shards need not be equal


def batch() -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(5)
    hidden = torch.randn(14, 12, generator=rng, dtype=torch.float64)
    weight = torch.randn(300, 12, generator=rng, dtype=torch.float64)
    bias = torch.randn(300, generator=rng, dtype=torch.float64)
    bias[140:] = torch.where(torch.rand(160, generator=rng) < 0.5, bias[140:], -torch.inf)
    targets = torch.randint(0, 140, (14,), generator=rng)
    targets[3] = -100
    return hidden, weight, bias, targets


def everything(hidden, weight, bias, targets, group) -> list[torch.Tensor]:
    """Outputs and gradients of everything differentiable."""
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    out = linear_logprob(
        leaves[0],
        leaves[1],
        targets,
        bias=leaves[2],
        softcap=None,
        outputs=OUTPUTS,
        topk=3,
        process_group=group,
    )
    scale = torch.linspace(-1, 2, 14, dtype=torch.float64)
    loss = ((out.logprob + 0.5 * out.entropy + 0.1 * out.logsumexp) * scale).sum()
    loss = loss + linear_cross_entropy(leaves[0], leaves[1], targets, process_group=group)
    gradients = torch.autograd.grad(loss, leaves)
    return [getattr(out, name) for name in OUTPUTS] + [out.topk_ids, out.topk_logprobs, loss, *gradients]


def one_rank(rank: int, port: int, results) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    hidden, weight, bias, targets = batch()
    rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    found = everything(hidden, weight[rows], bias[rows], targets, dist.group.WORLD)
    results.put((rank, [t.detach().tolist() for t in found]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks() -> dict[int, list[torch.Tensor]]:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with __import__("socket").socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [context.Process(target=one_rank, args=(rank, port, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    return {rank: [torch.tensor(value) for value in values] for rank, values in found.items()}


def test_outputs_and_losses_are_the_same_on_every_rank_as_on_one(two_ranks):
    expected = everything(*batch(), None)

    for found in two_ranks.values():
        for name, a, b in zip((*OUTPUTS, "ids", "logprobs", "loss"), found, expected, strict=False):
            torch.testing.assert_close(a.to(b.dtype), b.detach(), msg=name)


def test_each_rank_has_the_hidden_gradient_and_its_rows_of_the_others(two_ranks):
    hidden, weight, bias = everything(*batch(), None)[-3:]

    for rank, found in two_ranks.items():
        rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
        for a, b in zip(found[-3:], (hidden, weight[rows], bias[rows]), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
