"""Two ranks, forked after the imports: `python parallel_worker.py FOLDER`, which gets what each found."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import save_file

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
    targets[4:6] = torch.tensor([SPLIT - 1, SPLIT])  # on both sides of the border
    return hidden, weight, bias, targets


def everything(hidden, weight, bias, targets, group) -> list[torch.Tensor]:
    """Outputs and gradients of everything differentiable."""
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    options = {"outputs": OUTPUTS, "process_group": group}
    out = linear_logprob(leaves[0], leaves[1], targets, bias=leaves[2], **options)
    scale = torch.linspace(-1, 2, 14, dtype=torch.float64)
    loss = ((out.logprob + 0.5 * out.entropy + 0.1 * out.logsumexp) * scale).sum()
    loss = loss + linear_cross_entropy(leaves[0], leaves[1], targets, process_group=group)
    gradients = torch.autograd.grad(loss, leaves)
    return [*(getattr(out, name) for name in OUTPUTS), loss, *gradients]


def sure(group, rows: slice = slice(None)) -> list[torch.Tensor]:
    """Log-probabilities of ever surer targets, and the hidden gradient, in float32."""
    _, weight, _, targets = batch()
    margin = torch.linspace(0, 60, 14, dtype=torch.float64)[:, None]
    hidden = (
        margin * weight[targets.clamp(min=0)] / weight[targets.clamp(min=0)].square().sum(1, keepdim=True)
    )
    kind = torch.float32 if group is not None else torch.float64
    hidden = hidden.float().to(kind).requires_grad_()
    weight = weight[rows].float().to(kind)
    logprob = linear_logprob(hidden, weight, targets, process_group=group).logprob
    return [logprob, *torch.autograd.grad(logprob.sum(), hidden)]


def rows_of(rank: int) -> slice:
    return slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)


def main(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=500)
    )
    hidden, weight, bias, targets = batch()
    rows = rows_of(rank)
    found = everything(hidden, weight[rows], bias[rows], targets, dist.group.WORLD)
    found += sure(dist.group.WORLD, rows)
    save_file({str(i): t.detach().contiguous() for i, t in enumerate(found)}, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.start_processes(main, args=(sys.argv[1],), nprocs=2, start_method="fork")
