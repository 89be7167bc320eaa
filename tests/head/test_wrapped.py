"""Gradients of each public function inside torch's and accelerate's wrappers equal those without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as checkpoints

from grpo_fast import (
    GRPOLossConfig,
    StepTotals,
    linear_cross_entropy,
    linear_grpo_loss,
    linear_kl,
    linear_logprob,
)

OUTPUTS = ("entropy", "logsumexp", "mean_logit", "argmax_is_target", "log_sum_sq_probs")
CONFIG = GRPOLossConfig("grpo", beta=0.1, entropy_coef=0.01, top_entropy_quantile=0.8)


def logprob(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    out = linear_logprob(hidden, weight, batch["targets"], outputs=OUTPUTS, seed=batch["seed"])
    return out.logprob.sum() + out.entropy.square().sum(), out


def one_statistic(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    """The gradient that a frozen head's forward prepares."""
    out = linear_logprob(hidden, weight, batch["targets"], temperature=batch["temperature"])
    return out.logprob.sum(), out


def cross_entropy(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    loss = linear_cross_entropy(hidden, weight, batch["targets"], label_smoothing=0.1, z_loss=0.01)
    return loss, loss


def policy_loss(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    advantages = batch["advantages"]
    out = linear_grpo_loss(
        hidden, weight, batch["targets"], advantages, sequence_ids=batch["sequence_ids"], config=CONFIG,
        old_logprobs=advantages - 4, ref_logprobs=advantages - 3, num_sequences=len(advantages) // 4,
        totals=StepTotals(len(advantages) + batch["seed"], 7.0) if batch["seed"] else None,
    )  # fmt: skip
    return out.loss, out


def kl(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    mask, options = batch["targets"] > 5, {"temperature": batch["temperature"], "seed": batch["seed"]}
    out = linear_kl(hidden, weight, mask, hidden.detach().flip(0), weight.detach(), **options)
    return out.divergence.square().sum(), out


FUNCTIONS = [logprob, one_statistic, cross_entropy, policy_loss, kl]


class Head(nn.Module):
    def __init__(self, function: Callable[..., Any], weight: Tensor, frozen: bool) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(weight.clone(), requires_grad=not frozen)

    def forward(self, hidden: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        return self.function(self.scale * hidden, self.weight, batch)


def checkpointed(head: Head, **options: Any) -> Callable[..., tuple[Tensor, Any]]:
    return partial(checkpoints.checkpoint, head, use_reentrant=False, **options)


def to_the_end(head: Head) -> Callable[..., tuple[Tensor, Any]]:
    def run(*arguments: Any) -> tuple[Tensor, Any]:
        with checkpoints.set_checkpoint_early_stop(False):
            return checkpointed(head)(*arguments)

    return run


def selective(head: Head) -> Callable[..., tuple[Tensor, Any]]:
    save, compute = checkpoints.CheckpointPolicy.MUST_SAVE, checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    def policy(_context: object, operator: object, *_: object, **__: object) -> Any:
        heads = torch.ops.grpo_fast.head_forward.default, torch.ops.grpo_fast.divergence_forward.default
        return save if operator in heads else compute

    contexts = partial(checkpoints.create_selective_checkpoint_contexts, policy)
    return checkpointed(head, context_fn=contexts)


compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
WRAPPERS = {
    "compiled": compiled,
    "compiled for any shape": partial(compiled, dynamic=True),
    "checkpointed": checkpointed,
    "checkpointed to the end": to_the_end,
    "checkpointed by operator": selective,
    "checkpointed and compiled": lambda head: checkpointed(compiled(head)),
    "compiled with its checkpoint": lambda head: torch.compile(checkpointed(head), backend="aot_eager"),
    "DDP": DistributedDataParallel,
    "DDP, compiled": lambda head: torch.compile(DistributedDataParallel(head), backend="aot_eager"),
    "accelerate": lambda head: Accelerator(cpu=True).prepare(head),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("rank") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_batch(rng: torch.Generator, sequences: int, seed: int) -> tuple[Tensor, dict[str, Any]]:
    tokens = 4 * sequences
    return torch.randn(tokens, 16, generator=rng).requires_grad_(), {
        "targets": torch.randint(50, (tokens,), generator=rng),
        "advantages": torch.randn(tokens, generator=rng),
        "sequence_ids": torch.arange(tokens) // 4,
        "seed": seed,
        "temperature": 0.7 + 0.1 * seed,
    }


def gradients(run: Callable[..., tuple[Tensor, Any]], head: Head, hidden: Tensor, batch: Any) -> list[Any]:
    loss, out = run(hidden, batch)
    loss.backward()
    found = [leaf.grad for leaf in (hidden, *head.parameters())]
    hidden.grad = head.weight.grad = head.scale.grad = None
    fields = {} if isinstance(out, Tensor) else vars(out)
    return [loss.detach(), *found, {name: each for name, each in fields.items() if isinstance(each, Tensor)}]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.drawn(30)
def test_gradients_inside_a_wrapper_are_those_without(wrapper, function, frozen, rng):
    torch.compiler.reset()
    head = Head(function, torch.randn(50, 16, generator=rng), frozen)
    hidden, batch = make_batch(rng, 3, 0)
    expected = gradients(head, head, hidden, batch)

    found = gradients(WRAPPERS[wrapper](head), head, hidden, batch)

    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_compiled_caller_is_compiled_once_for_all_sizes_and_numbers(function, rng):
    torch.compiler.reset()
    head, backend = (
        Head(function, torch.randn(50, 16, generator=rng), False),
        CompileCounterWithBackend("aot_eager"),
    )
    run, counts = torch.compile(head, backend=backend, fullgraph=True, dynamic=True), []
    for sequences, seed in ((3, 2), (5, 4), (4, 5), (7, 6)):
        hidden, batch = make_batch(rng, sequences, seed)
        torch.testing.assert_close(gradients(run, head, hidden, batch), gradients(head, head, hidden, batch))
        counts.append(backend.frame_count)
    assert counts[0] == counts[-1] > 0
