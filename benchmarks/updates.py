"""One policy update of a real architecture, ours and TRL's, and TRL's trainer on prompts.

`ours` runs one optimizer step of our trainer. `TRL` runs the loss of its GRPOTrainer on padded batches. The
loss is DAPO's. The learning rate is so small that the weights stay equal: losses and gradient norms can be
compared. For both, tokens count every sequence with its own prompt and without padding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from grpo_fast.config.policy import ModelConfig, OptimizerConfig
from grpo_fast.head import linear_grpo_loss
from grpo_fast.objective import GRPOLossConfig
from grpo_fast.policy import PackedBatch, PolicyOptimizer, pack

from . import models
from .measure import Stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOTrainer

OURS, TRL = IMPLEMENTATIONS = ("ours", "TRL")
FORWARD, HEAD, BACKWARD, OPTIMIZER, PACK = "forward", "head and loss", "backward", "optimizer", "pack"
LOSS = GRPOLossConfig(loss_type="dapo", epsilon_low=0.2, epsilon_high=0.28)
TRL_LOSS = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}  # of GRPOConfig
_STILL = OptimizerConfig(learning_rate=1e-12)


@dataclass(frozen=True)
class Prepared:
    """An implementation that is ready to run."""

    run: Callable[[], None]  # one update, with its phases marked on the watch
    watch: Stopwatch
    last: dict[str, float]  # tokens, loss and gradient norm of the last update, equal for all


@dataclass
class Update:
    """A model, an optimizer and a batch."""

    model: ModelConfig  # its path is an architecture's name
    layers: int
    lengths: Sequence[tuple[int, int]]  # tokens of the prompt and of the completion, group after group
    group: int
    micro_batch_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        vocabulary = models.ARCHITECTURES[self.model.path][1]["vocab_size"]
        self.samples, self.totals = models.make_samples(self.lengths, self.group, vocabulary, self.seed)
        self.policy = models.make_policy(self.model, self.layers, self.seed)
        self.optimizer = PolicyOptimizer(self.policy.trainable(), _STILL, total_steps=1)

    def prepared(
        self,
        attention: str,
        batches: Callable[[Stopwatch], Sequence[Any]],
        loss_of: Callable[[Any, Stopwatch], Tensor],
    ) -> Prepared:
        """Make an implementation from its micro-batches and the loss of each."""
        policy, optimizer = self.policy, self.optimizer
        last, watch = {"tokens": float(sum(map(sum, self.lengths)))}, Stopwatch(policy.device)

        def run() -> None:
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

        return Prepared(run, watch, last)


def prepare_ours(update: Update) -> Prepared:
    policy = update.policy
    head = policy.head

    def batches(watch: Stopwatch) -> list[PackedBatch]:
        with watch.phase(PACK):
            return pack(update.samples, max_tokens=update.micro_batch_tokens, device=policy.device)

    def loss_of(batch: PackedBatch, watch: Stopwatch) -> Tensor:
        with watch.phase(FORWARD):
            hidden = policy.hidden_states(batch)
        with watch.phase(HEAD):
            operands = hidden, head.weight.detach(), batch.targets, batch.columns["advantages"]
            sequences = {"sequence_ids": batch.sequence_ids, "num_sequences": batch.num_sequences}
            options = {"weight_grad": update.optimizer.gradient_of(head.weight), **head.options}
            usual = {"totals": update.totals, "config": LOSS, "entropy": True}
            return linear_grpo_loss(*operands, **sequences, **usual, **options).loss

    return update.prepared(policy.base_model.config._attn_implementation, batches, loss_of)


def prepare_trl(update: Update) -> Prepared:
    """Take the loss of a GRPOTrainer around the same model, which never trains itself."""
    from transformers.utils import is_flash_attn_2_available

    policy, batches = update.policy, _padded(update)
    options = {
        **TRL_LOSS,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "gradient_accumulation_steps": len(batches),
        "gradient_checkpointing": False,  # as in the model of both
        "use_cpu": policy.device.type == "cpu",
    }
    trainer = trl_trainer(policy.model, policy.tokenizer, prompts=("a",), **options)
    trainer.current_gradient_accumulation_steps = len(batches)
    layers = policy.base_model.base_model
    forward = layers.forward

    def loss_of(batch: dict[str, Tensor], watch: Stopwatch) -> Tensor:
        with watch.phase(HEAD), mock.patch.object(layers, "forward", watch.phase(FORWARD)(forward)):
            return trainer.compute_loss(policy.model, batch)

    flash = is_flash_attn_2_available() and policy.head.weight.element_size() == 2
    attention = "flash_attention_2" if flash else "sdpa"
    return update.prepared(attention, lambda _: batches, loss_of)


def _padded(update: Update) -> list[dict[str, Tensor]]:
    """Return TRL's inputs: prompts padded on the left, completions on the right, to the longest of all."""
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


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Reward digits: every completion scores, so that every group has spread."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def trl_trainer(
    model: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    reward: Callable[..., list[float]] = share_of_digits,
    **options: Any,
) -> GRPOTrainer:
    """Make a GRPOTrainer that writes and prints nothing; `options` are GRPOConfig's.

    `columns` of the dataset reach `reward`. A model in a folder is loaded in float32, with its tokenizer.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    if isinstance(model, Path):
        options["model_init_kwargs"] = {"dtype": "float32"}  # the masters; bf16 is TRL's autocast over them
    usual = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1, "bf16": False}
    table = InMemoryTable.from_pydict({"prompt": prompts, **columns})
    trainer = GRPOTrainer(
        model=str(model) if isinstance(model, Path) else model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=tempfile.gettempdir(), **usual | options),
        # With a fingerprint, because some versions of pyarrow cannot be hashed.
        train_dataset=Dataset(table, fingerprint="prompts"),
        processing_class=tokenizer or AutoTokenizer.from_pretrained(model),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


PREPARE = dict(zip(IMPLEMENTATIONS, (prepare_ours, prepare_trl), strict=True))
