"""`python -m benchmarks step`: one policy update of a real architecture, phase by phase, three ways.

Random weights, sequences of real lengths. `ours` does what the trainer does in an update of one optimiser
step: pack, forward to the last hidden states, fused head and loss, backward, optimizer. `torch full logits`
puts the whole logits in the head's place. `TRL` is the loss of its GRPOTrainer on padded batches. The loss is
DAPO's; the learning rate is so small that the weights stay, and losses and gradient norms of all three can be
compared.

Tokens per second and the share of the ceiling (model FLOP utilisation, against a product measured in the same
run) count every sequence with its own prompt and without padding, for all implementations alike: sharing
prompts shows as speed, padding as the lack of it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.config.policy import ModelConfig, OptimizerConfig
from grpo_fast.head import HeadParameters, linear_grpo_loss
from grpo_fast.objective import LossInputs, StepTotals, policy_loss
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, pack

from . import models
from .contest import FLOPS, TOKENS, Contest, Entrant, Prepared
from .machine import square_product
from .measure import Stopwatch
from .peers import choose_names
from .session import add_common_arguments, add_sizes, check_common, run_session, sizes_of
from .trainers import LOSS, TRL_LOSS, in_phase, small_words, trl_trainer

SIZES = {
    "prompts": (16, 1, "of the update"),
    "group": (16, 4, "completions a prompt"),
    "micro_batch_tokens": (16_384, 512, "of a forward and backward"),
}
OURS, FULL, TRL = IMPLEMENTATIONS = ("ours", "torch full logits", "TRL")
FORWARD, HEAD, BACKWARD, OPTIMIZER, PACK = "forward", "head and loss", "backward", "optimizer", "pack"
_STILL = OptimizerConfig(learning_rate=1e-12)


@dataclass
class Update:
    """What is updated on what; the model is made on first use."""

    model: ModelConfig  # its path is an architecture's name
    layers: int
    lengths: Sequence[tuple[int, int]]  # tokens of the prompt and of the completion, group after group
    group: int
    micro_batch_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        vocabulary = models.vocabulary_of(self.model.path)
        self.samples, self.totals = models.make_samples(self.lengths, self.group, vocabulary, self.seed)

    @cached_property
    def policy(self) -> Policy:
        return models.make_policy(self.model, self.layers, self.seed)

    @cached_property
    def optimizer(self) -> PolicyOptimizer:
        return PolicyOptimizer(self.policy.trainable(), _STILL, total_steps=1)

    def prepared(
        self,
        attention: str,
        batches: Callable[[Stopwatch], Sequence[Any]],
        loss_of: Callable[[Any, Stopwatch], Tensor],
        close: Callable[[], object] = lambda: None,
    ) -> Prepared:
        """An implementation by its micro-batches and the loss of each."""
        policy, optimizer = self.policy, self.optimizer
        last: dict[str, float] = {}  # shows that all implementations compute the same

        def run(watch: Stopwatch) -> None:
            policy.base_model.set_attn_implementation(attention)
            losses = []
            for batch in batches(watch):
                loss = loss_of(batch, watch)
                with watch.phase(BACKWARD):
                    loss.backward()
                losses.append(loss.detach())
            with watch.phase(OPTIMIZER):
                last["grad_norm"] = optimizer.step()
            last["loss"] = float(torch.stack(losses).sum())

        def metrics(_: float) -> dict[str, float]:
            held = [*policy.model.parameters(), *optimizer.state_tensors().values()]
            return last | {"held_bytes": float(sum(tensor.nbytes for tensor in held))}

        work = {
            FLOPS: models.update_flops(policy.base_model, self.lengths),
            TOKENS: sum(map(sum, self.lengths)),
        }
        return Prepared(run, work, metrics, close=close)


def entrant(name: str, update: Update) -> Entrant:
    """The named implementation of the update."""
    return Entrant(name, partial(_trl, update) if name == TRL else partial(_packed, name, update))


def _packed(name: str, update: Update) -> Prepared:
    policy = update.policy

    def batches(watch: Stopwatch) -> list[PackedBatch]:
        with watch.phase(PACK):
            return pack(update.samples, max_tokens=update.micro_batch_tokens, device=policy.device)

    def loss_of(batch: PackedBatch, watch: Stopwatch) -> Tensor:
        with watch.phase(FORWARD):
            hidden = policy.hidden_states(batch)
        with watch.phase(HEAD):
            if name == FULL:
                return full_logits_loss(policy.head, hidden, batch, update.totals)
            head = policy.head
            return linear_grpo_loss(
                hidden,
                head.weight.detach(),
                batch.targets,
                batch.columns["advantages"],
                sequence_ids=batch.sequence_ids,
                num_sequences=batch.num_sequences,
                totals=update.totals,
                config=LOSS,
                entropy=True,
                weight_grad=update.optimizer.gradient_of(head.weight),
                **head.options,
            ).loss

    return update.prepared(policy.base_model.config._attn_implementation, batches, loss_of)


def full_logits_loss(
    head: HeadParameters, hidden: Tensor, batch: PackedBatch, totals: StepTotals | None = None
) -> Tensor:
    """By the logits of all tokens at once."""
    log_p = F.linear(hidden, head.weight, head.bias).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    inputs = LossInputs(
        logprobs=log_p.gather(-1, batch.targets[:, None]).squeeze(-1),
        advantages=batch.columns["advantages"],
        sequence_ids=batch.sequence_ids,
        loss_mask=torch.ones_like(batch.targets, dtype=torch.bool),
        num_sequences=batch.num_sequences,
        entropy=entropy,
        totals=totals,
    )
    return policy_loss(inputs, LOSS).loss


def _trl(update: Update) -> Prepared:
    """The loss of a GRPOTrainer around the same model, which never trains itself."""
    from transformers.utils import is_flash_attn_2_available
    from trl import GRPOTrainer

    policy = update.policy
    batches = _padded(update)
    folder = tempfile.TemporaryDirectory()
    options = {
        **TRL_LOSS,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "gradient_accumulation_steps": len(batches),
        "gradient_checkpointing": False,  # as the model was made, for all
        "use_cpu": policy.device.type == "cpu",
    }
    trainer = trl_trainer(
        GRPOTrainer,
        folder.name,
        policy.model,
        policy.tokenizer,
        prompts=("w0",),
        reward=small_words,
        **options,
    )
    trainer.current_gradient_accumulation_steps = len(batches)
    layers = policy.base_model.base_model
    forward = layers.forward

    def loss_of(batch: dict[str, Tensor], watch: Stopwatch) -> Tensor:
        with watch.phase(HEAD), mock.patch.object(layers, "forward", in_phase(forward, watch, FORWARD)):
            return trainer.compute_loss(policy.model, batch)

    flash = is_flash_attn_2_available() and policy.head.weight.element_size() == 2
    attention = "flash_attention_2" if flash else "sdpa"
    return update.prepared(attention, lambda _: batches, loss_of, close=folder.cleanup)


def _padded(update: Update) -> list[dict[str, Tensor]]:
    """TRL's inputs: prompts padded on the left, completions on the right, to the longest of the update.

    As many sequences at once as the budget of a micro-batch holds.
    """
    table = update.samples
    tensors = {"advantages": table.columns["advantages"][table.offsets[:-1]]}
    for part, side, of_row in (("prompt", "left", table.prompt_of), ("completion", "right", table.tokens_of)):
        rows = [of_row(row).tolist() for row in range(len(table))]
        padded = update.policy.tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
        tensors |= {f"{part}_ids": padded["input_ids"], f"{part}_mask": padded["attention_mask"]}
    longest = tensors["prompt_ids"].shape[1] + tensors["completion_ids"].shape[1]
    at_once = max(1, update.micro_batch_tokens // longest)
    device = update.policy.device
    tokens = {"num_items_in_batch": torch.tensor(float(update.totals.num_tokens), device=device)}
    parts = zip(*(whole.to(device).split(at_once) for whole in tensors.values()), strict=True)
    return [dict(zip(tensors, part, strict=True)) | tokens for part in parts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=9)
    gpu = ["Qwen2.5-1.5B", "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B"]
    models.add_models(parser, gpu, ["SmolLM2-135M"], cpu_layers=2)
    add_sizes(parser, SIZES)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    names = choose_names(list(IMPLEMENTATIONS), options.impl)
    sizes = sizes_of(options, SIZES)
    lengths = models.draw_lengths(options.prompts, options.group, options.seed)
    contests = []
    for model, shape in models.chosen_models(options):
        of_model = model, shape["layers"], lengths
        update = Update(*of_model, options.group, options.micro_batch_tokens, options.seed)
        shape |= {**sizes, "tokens": sum(map(sum, lengths)), "dtype": options.dtype}
        entrants = [square_product(options.dtype, device), *(entrant(name, update) for name in names)]
        contests.append(Contest(shape, entrants, device))
    return run_session(options, contests)
