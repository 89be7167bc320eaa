"""The vocabulary split over two processes gives what one process gives.

`python test_parallel.py FOLDER` forks two ranks after the imports; FOLDER gets what each found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from grpo_fast import linear_cross_entropy, linear_kl, linear_logprob

OUTPUTS = ("logprob", "entropy", "logsumexp", "mean_logit", "argmax_is_target", "log_sum_sq_probs")
SPLIT = 130  # of 300: the shards need not be equal
ROWS = (slice(0, SPLIT), slice(SPLIT, None))


def batch() -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(5)
    hidden = torch.randn(14, 12, generator=rng, dtype=torch.float64)
    weight = torch.randn(300, 12, generator=rng, dtype=torch.float64)
    bias = torch.randn(300, generator=rng, dtype=torch.float64)
    bias[140:] = torch.where(torch.rand(160, generator=rng) < 0.5, bias[140:], -torch.inf)
    targets = torch.randint(0, 140, (14,), generator=rng)
    targets[3] = -100
    targets[4:6] = torch.tensor([SPLIT - 1, SPLIT])  # on both sides of the border
    return hidden, weight, bias, targets


def everything(group, rows: slice = slice(None)) -> list[Tensor]:
    """Outputs and gradients of everything differentiable."""
    hidden, weight, bias, targets = batch()
    leaves = [t.clone().requires_grad_() for t in (hidden, weight[rows], bias[rows])]
    options = {"outputs": OUTPUTS, "process_group": group}
    out = linear_logprob(leaves[0], leaves[1], targets, bias=leaves[2], **options)
    scale = torch.linspace(-1, 2, 14, dtype=torch.float64)
    loss = ((out.logprob + 0.5 * out.entropy + 0.1 * out.logsumexp) * scale).sum()
    loss = loss + linear_cross_entropy(leaves[0], leaves[1], targets, process_group=group)
    return [*(getattr(out, name) for name in OUTPUTS), loss, *torch.autograd.grad(loss, leaves)]


def divergences(group, rows: slice = slice(None)) -> list[Tensor]:
    """Each direction, with the gradients of its weighted sum."""
    hidden, weight, bias, targets = batch()
    leaves = [t.clone().requires_grad_() for t in (hidden, weight[rows], bias[rows])]
    reference = 0.7 * hidden + 0.3 * hidden.roll(1, 0), weight[rows].roll(1, 1)
    found: list[Tensor] = []
    for direction in ("reverse", "forward", "jsd"):
        own = leaves[2] if direction == "reverse" else leaves[2].nan_to_num(neginf=0.0)
        out = linear_kl(
            leaves[0], leaves[1], targets != -100, *reference, bias=own, ref_bias=bias[rows], beta=0.3,
            direction=direction, process_group=group,
        )  # fmt: skip
        loss = (out.divergence * torch.linspace(-1, 2, 14, dtype=torch.float64)).sum()
        found += [out.divergence, *torch.autograd.grad(loss, leaves)]
    return found


def sure(group, rows: slice = slice(None)) -> list[Tensor]:
    """Log-probabilities of ever surer targets and the hidden gradient, in float32 where there is a group."""
    _, weight, _, targets = batch()
    own = weight[targets.clamp(min=0)]
    margin = torch.linspace(0, 60, 14, dtype=torch.float64)[:, None]
    hidden = margin * own / own.square().sum(1, keepdim=True)
    kind = torch.float32 if group is not None else torch.float64
    hidden = hidden.float().to(kind).requires_grad_()
    logprob = linear_logprob(hidden, weight[rows].float().to(kind), targets, process_group=group).logprob
    return [logprob, *torch.autograd.grad(logprob.sum(), hidden)]


def main(rank: int, folder: str) -> None:
    store, patience = f"file://{folder}/store", timedelta(seconds=500)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    group = dist.group.WORLD
    found = divergences(group, ROWS[rank]) + everything(group, ROWS[rank]) + sure(group, ROWS[rank])
    torch.save([t.detach() for t in found], f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_each_rank_has_the_outputs_of_one_and_its_rows_of_the_gradients(tmp_path):
    command, environment = [sys.executable, __file__, tmp_path], os.environ | {"OMP_NUM_THREADS": "1"}
    *outputs, weight, bias = everything(None)
    logprob, of_hidden = (exact.detach() for exact in sure(None))

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stderr
    for rank, rows in enumerate(ROWS):
        *found, found_logprob, found_hidden = torch.load(tmp_path / str(rank))
        for whole in divergences(None):
            expected = whole if len(whole) == 14 else whole[rows]
            torch.testing.assert_close(found.pop(0), expected.detach())
        for got, expected in zip(found, (*outputs, weight[rows], bias[rows]), strict=True):
            torch.testing.assert_close(got, expected.detach())
        works = logprob != 0
        assert logprob[works].abs().min() < 1e-10
        torch.testing.assert_close(found_logprob[works].double(), logprob[works], rtol=2e-5, atol=0)
        error = (found_hidden.double() - of_hidden).norm(dim=1) / of_hidden.norm(dim=1)
        assert error[works].max() < 2e-5


if __name__ == "__main__":
    multiprocessing.start_processes(main, args=(sys.argv[1],), nprocs=2, start_method="fork")
