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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.objective import GRPOLossConfig, LossInputs, StepTotals, policy_loss
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, Sample, pack
from grpo_fast.policy.config import OptimizerConfig
from grpo_fast.update import packed_loss

from .contest import Contest, Entrant, Prepared, Work
from .machine import square_product
from .measure import Stopwatch
from .models import (
    LENGTHS,
    Architecture,
    add_model_arguments,
    add_training_arguments,
    chosen_models,
    load_lengths,
    make_policy,
    make_samples,
    make_tokenizer,
    training_options,
)
from .peers import choose_names
from .session import add_common_arguments, check_common, positive, run_session

KIND = "step"
_MODELS = {"cuda": ("Qwen2.5-1.5B", "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B"), "cpu": ("SmolLM2-135M",)}
_SIZES = {"cuda": (16, 16, 16_384, None), "cpu": (1, 4, 512, 2)}  # prompts, group, micro-batch, layers
OURS, FULL, TRL = "ours", "torch full logits", "TRL"
IMPLEMENTATIONS = (OURS, FULL, TRL)
FORWARD, HEAD, BACKWARD, OPTIMIZER, PACK = "forward", "head and loss", "backward", "optimizer", "pack"
LOSS = GRPOLossConfig(loss_type="dapo", epsilon_low=0.2, epsilon_high=0.28)
_STILL = OptimizerConfig(learning_rate=1e-12)


@dataclass
class Update:
    """What is updated on what; the model is made on first use."""

    architecture: Architecture
    samples: list[Sample]
    totals: StepTotals
    micro_batch_tokens: int
    dtype: str
    device: torch.device
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of `make_policy`
    losses: dict[str, float] = field(default_factory=dict)  # of the last repetition, by implementation
    norms: dict[str, float] = field(default_factory=dict)

    @cached_property
    def policy(self) -> Policy:
        return make_policy(
            self.architecture, dtype=self.dtype, device=self.device, seed=self.seed, **self.options
        )

    @cached_property
    def optimizer(self) -> PolicyOptimizer:
        return PolicyOptimizer(self.policy.trainable(), _STILL, total_steps=1)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return [(len(sample.prompt_ids), len(sample.completion_ids)) for sample in self.samples]

    @property
    def work(self) -> Work:
        tokens = sum(prompt + completion for prompt, completion in self.lengths)
        adapted = self.options.get("lora_rank") is not None
        flops = self.architecture.update_flops(
            self.lengths, layers=not adapted, head=not (adapted or self.options.get("freeze_head"))
        )
        return Work(flops=flops, tokens=tokens)

    def metrics(self, name: str) -> dict[str, float]:
        """Beside the rates: what shows that an implementation computed the same."""
        held = sum(p.nbytes for p in self.policy.model.parameters())
        held += sum(t.nbytes for t in self.optimizer.state_tensors().values())
        return {"loss": self.losses[name], "grad_norm": self.norms[name], "held_bytes": float(held)}

    def finish(self, name: str, losses: list[Tensor], watch: Stopwatch) -> None:
        with watch.phase(OPTIMIZER):
            self.norms[name] = self.optimizer.step()
        self.losses[name] = float(torch.stack(losses).sum())


def entrant(name: str, update: Update) -> Entrant:
    """The named implementation of the update."""
    prepare = {OURS: _ours, FULL: _full, TRL: _trl}[name]
    return Entrant(name, lambda: prepare(update))


def _ours(update: Update) -> Prepared:
    def loss(batch: PackedBatch, hidden: Tensor) -> Tensor:
        head = update.policy.head
        into = update.optimizer.gradient_of(head.weight)
        return packed_loss(head, hidden, batch, LOSS, totals=update.totals, weight_grad=into).loss

    return _packed(OURS, update, loss)


def _full(update: Update) -> Prepared:
    def loss(batch: PackedBatch, hidden: Tensor) -> Tensor:
        head = update.policy.head
        log_p = F.linear(hidden, head.weight, head.bias).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return policy_loss(
            LossInputs(
                logprobs=log_p.gather(-1, batch.targets[:, None]).squeeze(-1),
                advantages=batch.advantages,
                sequence_ids=batch.sequence_ids,
                loss_mask=torch.ones_like(batch.targets, dtype=torch.bool),
                num_sequences=batch.num_sequences,
                entropy=entropy,
                totals=update.totals,
            ),
            LOSS,
        ).loss

    return _packed(FULL, update, loss)


def _packed(name: str, update: Update, loss_of: Callable[[PackedBatch, Tensor], Tensor]) -> Prepared:
    policy, _ = update.policy, update.optimizer

    def run(watch: Stopwatch) -> None:
        with watch.phase(PACK):
            batches = pack(
                update.samples,
                max_tokens=update.micro_batch_tokens,
                share_prompts=policy.shares_prompts,
                device=update.device,
            )
        losses = []
        for batch in batches:
            with watch.phase(FORWARD):
                hidden = policy.hidden_states(batch)
            with watch.phase(HEAD):
                loss = loss_of(batch, hidden)
            with watch.phase(BACKWARD):
                loss.backward()
            losses.append(loss.detach())
        update.finish(name, losses, watch)

    return Prepared(run, update.work, lambda _: update.metrics(name))


def _trl(update: Update) -> Prepared:
    """Padded to the longest prompt and completion, as TRL pads; as many sequences at once as the budget
    holds."""
    batches = _padded(update)
    model, _ = update.policy.model, update.optimizer
    ours = model.config._attn_implementation
    folder = tempfile.TemporaryDirectory()
    trainer = _trl_trainer(update, folder.name, len(batches))
    inner = update.policy.base_model.base_model
    inner_forward = inner.forward

    def run(watch: Stopwatch) -> None:
        def forward(*arguments: Any, **options: Any) -> Any:
            with watch.phase(FORWARD):
                return inner_forward(*arguments, **options)

        _attend_with(update.policy, "sdpa" if ours != "flash_attention_2" else ours)
        try:
            losses = []
            with mock.patch.object(inner, "forward", forward):
                for batch in batches:
                    with watch.phase(HEAD):
                        loss = trainer.compute_loss(model, batch)
                    with watch.phase(BACKWARD):
                        loss.backward()
                    losses.append(loss.detach())
            update.finish(TRL, losses, watch)
        finally:
            _attend_with(update.policy, ours)

    return Prepared(run, update.work, lambda _: update.metrics(TRL), close=folder.cleanup)


def _trl_trainer(update: Update, folder: str, steps: int) -> Any:
    """A GRPOTrainer around the same model, which never trains itself: only its loss is asked."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=update.policy.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=folder,
            loss_type="dapo",
            epsilon=LOSS.epsilon_low,
            epsilon_high=LOSS.epsilon_high,
            beta=0.0,
            per_device_train_batch_size=2,
            num_generations=2,
            gradient_accumulation_steps=steps,
            gradient_checkpointing=False,  # as the model was made, for all
            use_cpu=update.device.type == "cpu",
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "w0"}]),
        processing_class=make_tokenizer(update.architecture.vocabulary),
    )
    trainer.current_gradient_accumulation_steps = steps
    return trainer


def _padded(update: Update) -> list[dict[str, Tensor]]:
    """TRL's inputs: prompts padded on the left, completions on the right."""
    prompt_length, length = (max(sizes) for sizes in zip(*update.lengths, strict=True))
    at_once = max(1, update.micro_batch_tokens // (prompt_length + length))
    kind = {"device": update.device}

    def ids_and_mask(rows: list[tuple[int, ...]], width: int, *, left: bool) -> tuple[Tensor, Tensor]:
        ids = torch.full((len(rows), width), update.architecture.vocabulary - 2, **kind)
        mask = torch.zeros(len(rows), width, dtype=torch.long, **kind)
        for row, tokens in enumerate(rows):
            place = slice(width - len(tokens), width) if left else slice(len(tokens))
            ids[row, place] = torch.tensor(tokens, **kind)
            mask[row, place] = 1
        return ids, mask

    batches = []
    for start in range(0, len(update.samples), at_once):
        part = update.samples[start : start + at_once]
        prompt = ids_and_mask([sample.prompt_ids for sample in part], prompt_length, left=True)
        completion = ids_and_mask([sample.completion_ids for sample in part], length, left=False)
        tensors = {
            "advantages": torch.tensor([sample.advantage for sample in part], **kind),
            "num_items_in_batch": torch.tensor(float(update.totals.num_tokens), **kind),
        }
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        batches.append(dict(zip(names, (*prompt, *completion), strict=True)) | tensors)
    return batches


def _attend_with(policy: Policy, implementation: str) -> None:
    policy.base_model.set_attn_implementation(implementation)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=9)
    add_model_arguments(parser, layers_on_cpu=2)
    parser.add_argument("--prompts", type=positive, help="of the update (16; on a CPU 1)")
    parser.add_argument("--group", type=positive, help="completions a prompt (16; on a CPU 4)")
    parser.add_argument(
        "--micro-batch-tokens", type=positive, help="of a forward and backward (16384; CPU 512)"
    )
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", help="token counts, JSON; GSM8K's unless given"
    )
    add_training_arguments(parser)


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    names = choose_names(list(IMPLEMENTATIONS), options.impl)
    source = options.lengths or LENGTHS
    asked = (options.prompts, options.group, options.micro_batch_tokens)
    *usual, layers = _SIZES[device.type]
    prompts, group, budget = (given or size for given, size in zip(asked, usual, strict=True))
    drawn = load_lengths(source).draw(prompts, group, options.seed)
    made, said = training_options(options)
    bouts = []
    for architecture in chosen_models(options, _MODELS[device.type], layers):
        shape = {
            "model": architecture.name,
            "layers": architecture.layers,
            "prompts": prompts,
            "group": group,
            "tokens": sum(map(sum, drawn)),
            "micro_batch_tokens": budget,
            "lengths": source.stem,
            **said,
            "dtype": options.dtype,
        }
        samples, totals = make_samples(drawn, group, architecture.vocabulary, options.seed)
        update = Update(architecture, samples, totals, budget, options.dtype, device, options.seed, made)
        entrants = [square_product(options.dtype, device), *(entrant(name, update) for name in names)]
        bouts.append(Contest(shape, entrants, device))
    return run_session(KIND, options, device, bouts)
