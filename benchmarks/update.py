"""One policy update, three ways, on the same model, tokens and optimizer.

`ours` does what the trainer does in an update of one optimiser step: pack, forward to the last hidden
states, fused head and loss, backward, optimizer. `torch full logits` puts the whole logits in the head's
place. `TRL` is the loss of its GRPOTrainer on padded batches. The loss is DAPO's; the learning rate is so
small that the weights stay, and losses and gradient norms of all three can be compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.objective import GRPOLossConfig, LossInputs, StepTotals, policy_loss
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, Sample, pack
from grpo_fast.policy.config import OptimizerConfig
from grpo_fast.update import packed_loss

from .architectures import Architecture, make_policy, make_tokenizer
from .contest import Entrant, Prepared, Work
from .stopwatch import Stopwatch

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

    def run(watch: Stopwatch) -> None:
        open_phases: list[Any] = []

        def enter(*_: object) -> None:
            open_phases.append(watch.phase(FORWARD))
            open_phases[-1].__enter__()

        def leave(*_: object) -> None:
            open_phases.pop().__exit__(None, None, None)

        hooks = inner.register_forward_pre_hook(enter), inner.register_forward_hook(leave)
        _attend_with(update.policy, "sdpa" if ours != "flash_attention_2" else ours)
        try:
            losses = []
            for batch in batches:
                with watch.phase(HEAD):
                    loss = trainer.compute_loss(model, batch)
                with watch.phase(BACKWARD):
                    loss.backward()
                losses.append(loss.detach())
            update.finish(TRL, losses, watch)
        finally:
            _attend_with(update.policy, ours)
            for hook in hooks:
                hook.remove()

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
    prompt_length = max(prompt for prompt, _ in update.lengths)
    length = max(completion for _, completion in update.lengths)
    pad = update.architecture.vocabulary - 2
    at_once = max(1, update.micro_batch_tokens // (prompt_length + length))

    def rows(samples: list[Sample], ids: Callable[[Sample], tuple[int, ...]], width: int, left: bool) -> list:
        filled = []
        for sample in samples:
            padding = [(pad, 0)] * (width - len(ids(sample)))
            tokens = [(token, 1) for token in ids(sample)]
            filled.append(padding + tokens if left else tokens + padding)
        return torch.tensor(filled, device=update.device).unbind(-1)

    batches = []
    for start in range(0, len(update.samples), at_once):
        part = update.samples[start : start + at_once]
        prompt_ids, prompt_mask = rows(part, lambda s: s.prompt_ids, prompt_length, left=True)
        completion_ids, completion_mask = rows(part, lambda s: s.completion_ids, length, left=False)
        batches.append(
            {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "advantages": torch.tensor([s.advantages[0] for s in part], device=update.device),
                "num_items_in_batch": torch.tensor(float(update.totals.num_tokens), device=update.device),
            }
        )
    return batches


def _attend_with(policy: Policy, implementation: str) -> None:
    policy.base_model.set_attn_implementation(implementation)
