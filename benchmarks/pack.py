"""`python -m benchmarks pack`: nanoseconds a completion token that laying a step out for its update takes.

The completions' table is made from lists, as an engine hands them over, and packed into micro-batches. The
work is the host's, on any machine, while a GPU waits. By `--impl` also the advantages, and each policy loss,
forward and backward in plain torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from grpo_fast.data.table import Completions
from grpo_fast.groups.advantages import group_advantages
from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.catalog import LOSS_TYPES
from grpo_fast.policy.packing import pack

from .contest import Contest, Entrant, Prepared
from .peers import choose_names
from .session import add_common_arguments, add_sizes, check_common, positive, run_session, sizes_of

VOCABULARY, GOAL = 150_000, 150.0  # ns a token
SIZES = {
    "tokens": (2_000_000, 2_000_000, "completion tokens of the step"),
    "group": (16, 16, "completions of a prompt"),
    "prompt": (512, 512, "tokens of a prompt"),
    "completion": (2048, 2048, "most tokens of a completion"),
}
MICRO_BATCHES = (16_384, 131_072)  # tokens
USUAL = TABLE, PACK = "table from lists", "pack"
ADVANTAGES, LOSSES = "advantages", {f"loss {name}": name for name in LOSS_TYPES}


def draw(tokens: int, group: int, prompt: int, completion: int, seed: int) -> tuple[list[list[int]], ...]:
    """Prompt and completion of each, in whole groups, until there are so many completion tokens."""
    chance = np.random.default_rng(seed)
    prompts, completions, left = [], [], tokens
    while left > 0:
        prompts += [chance.integers(VOCABULARY, size=prompt).tolist()] * group
        lengths = chance.integers(1, completion + 1, size=group)
        completions += [chance.integers(VOCABULARY, size=length).tolist() for length in lengths]
        left -= int(lengths.sum())
    return prompts, completions


def loss_call(loss_type: str, lengths: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    """A policy loss and its gradient, of completions of these lengths, (S,)."""
    sequences, tokens = len(lengths), int(lengths.sum())
    logprobs = -2 * torch.rand(tokens)
    old, sampler = (logprobs + 0.1 * torch.randn(2, tokens)).clamp(max=0)
    ids = torch.arange(sequences).repeat_interleave(lengths)
    inputs = LossInputs(
        logprobs=logprobs.requires_grad_(),
        advantages=torch.randn(sequences)[ids],
        sequence_ids=ids,
        loss_mask=torch.rand(tokens) > 0.1,
        num_sequences=sequences,
        old_logprobs=old,
        sampler_logprobs=sampler,
    )
    config = GRPOLossConfig(loss_type, max_completion_length=int(lengths.max()))
    return lambda: torch.autograd.grad(policy_loss(inputs, config).loss, inputs.logprobs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=2, repeats=9)
    add_sizes(parser, SIZES)
    micro = {"type": positive, "nargs": "+", "default": MICRO_BATCHES}
    parser.add_argument("--micro-batch-tokens", **micro, help="tokens of a micro-batch, each in turn")


def main(options: argparse.Namespace) -> int:
    check_common(options)
    sizes = sizes_of(options, SIZES)
    rows = draw(**sizes, seed=options.seed)
    table = Completions.of(*rows)
    tokens = len(table.token_ids)
    rewards = torch.rand(len(table), 1).view(-1, options.group)

    def prepare(name: str, most: int) -> Prepared:
        if name in LOSSES:
            call = loss_call(LOSSES[name], table.lengths)
        else:
            call = {
                TABLE: lambda: Completions.of(*rows),
                # A copy: a table remembers how its rows were packed.
                PACK: lambda: pack(replace(table), max_tokens=most, device="cpu"),
                ADVANTAGES: lambda: group_advantages(rewards),
            }[name]
        return Prepared(
            lambda _: call(),
            metrics=lambda seconds: {"nanoseconds_a_token": 1e9 * seconds / tokens},
        )

    contests = []
    for most in options.micro_batch_tokens:
        shape = {**sizes, "tokens": tokens, "micro_batch_tokens": most}
        every = [*USUAL, ADVANTAGES, *LOSSES]
        names = choose_names(every, options.impl) if options.impl else USUAL
        entrants = [Entrant(name, partial(prepare, name, most)) for name in names]
        contests.append(Contest(shape, entrants, torch.device("cpu"), memory=False))
    return run_session(options, contests, notes=[f"the goal is {GOAL:g} ns a token at most"])
