"""The update: optimiser steps over one rollout's samples, in micro-batches that fit the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_fast.config import TrainConfig
from grpo_fast.distributed.world import ALONE, World
from grpo_fast.head import GRPOLossOutput, HeadOutput, linear_grpo_loss, linear_logprob
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.objective.surrogates import held_back
from grpo_fast.objective.terms import EntropyController, entropy_threshold, kl_estimate
from grpo_fast.objective.types import present
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, Sample, pack
from grpo_fast.policy.out_of_memory import MicroBatchBudget, optimizer_step
from grpo_fast.policy.packing import deal, empty_batch
from grpo_fast.rollout.transformers import evaluation_mode
from grpo_fast.run_record.logs import Clock

Result = TypeVar("Result")


@dataclass(frozen=True)
class Minibatch:
    """This rank's samples of one optimiser step, and the micro-batches they are packed in."""

    samples: tuple[Sample, ...]
    numbers: tuple[int, ...]  # of each among those of all ranks
    totals: StepTotals
    batches: tuple[PackedBatch, ...]
    max_tokens: int  # the budget they were packed within

    def with_values(self, name: str, values: Sequence[Tensor | None]) -> Minibatch:
        """`old_logprobs`, `ref_logprobs` or `held_back` set to these, (N,) for each micro-batch."""
        changes: list[Any] = [{name: value} for value in values]
        batches = [replace(batch, **change) for batch, change in zip(self.batches, changes, strict=True)]
        return replace(self, batches=tuple(batches))

    def repacked(self, batches: tuple[PackedBatch, ...], max_tokens: int) -> Minibatch:
        """The same samples in other micro-batches; what is known of their tokens moves along."""
        moved = replace(self, batches=batches, max_tokens=max_tokens)
        for name in ("old_logprobs", "ref_logprobs", "held_back"):
            values = [getattr(batch, name) for batch in self.batches]
            if self.samples and values[0] is not None:
                moved = moved.with_samples(name, self.by_sample(values))
        return moved

    def by_sample(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """(N,) values of each micro-batch as (C,) of each sample, by its number."""
        found: dict[int, Tensor] = {}  # a sequence's tokens are contiguous in its batch
        for batch, tokens in zip(self.batches, values, strict=True):
            ids = batch.sample_ids.tolist()
            parts = tokens.split([self.samples[i].num_targets for i in ids])
            found |= zip([self.numbers[i] for i in ids], parts, strict=True)
        return found

    def with_samples(self, name: str, known: Mapping[int, Tensor]) -> Minibatch:
        """`with_values` of what `by_sample` gives, on any device."""
        none, device = next(iter(known.values()))[:0], self.batches[0].targets.device
        parts = [[known[self.numbers[i]] for i in batch.sample_ids.tolist()] for batch in self.batches]
        return self.with_values(name, [torch.cat([none, *found]).to(device) for found in parts])


class PolicyUpdate:
    """Optimiser steps over samples. Out of memory, a gradient is computed again in smaller micro-batches.

    Samples, their group ids and totals are those of all ranks; each computes a part of them.

    Args:
        config: the run's, or its stage's; `configure` changes it.
        ready: waits for the reference's weights, where they were away.
        world: the ranks that train together, as the optimizer has them.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        config: TrainConfig,
        ready: Callable[[], None],
        world: World = ALONE,
    ) -> None:
        self.world = world
        self.policy = policy
        self.optimizer = optimizer
        self.config = config
        self.budget = MicroBatchBudget(
            unit="one completion with its prompt",
            remedy="lower rollout.max_completion_length",
            repeats=not policy.sharded,
        )
        self.entropy_controller = EntropyController.of(config.loss)
        self._ready = ready

    def configure(self, config: TrainConfig) -> None:
        """Go on with a stage's configuration; another loss has an entropy controller of its own."""
        if config.loss != self.config.loss:
            self.entropy_controller = EntropyController.of(config.loss)
        self.config = config

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch now."""
        return self.budget.tokens(int(self.config.micro_batch_tokens))  # `auto` has become a number

    def run(self, samples: Sequence[Sample], totals: StepTotals, clock: Clock) -> dict[str, float]:
        """`num_iterations` epochs of optimiser steps over one rollout; their mean metrics.

        Raises:
            torch.OutOfMemoryError: not even the longest completion alone fits.
        """
        if not samples:
            return {"update/skipped": 1.0, "learning_rate": self.optimizer.learning_rate}
        minibatches = self.split(samples, totals)
        with clock("logprobs"):
            for i, minibatch in enumerate(minibatches):
                with self.world.agreed("the log-probabilities"):
                    minibatches[i] = self.fit(minibatch, self.with_fixed_logprobs, i > 0)
        steps = []
        with clock("update"):
            for i in [*range(len(minibatches))] * self.config.num_iterations:
                minibatch, config = minibatches[i], self.loss_config()
                if self.world.size > 1:
                    minibatch = self.with_choices(minibatch, config)
                with self.world.agreed("the gradient"):
                    for attempt, fitted in self.budget.attempts(partial(self.fitted, minibatch)):
                        with attempt:
                            minibatches[i], shares = self.backward(fitted, config)
                steps.append(self.step(shares, config))
        return {name: fmean(step[name] for step in steps) for name in steps[0]} | {"update/skipped": 0.0}

    def split(self, samples: Sequence[Sample], totals: StepTotals) -> list[Minibatch]:
        """Minibatches of whole groups, each with its share of the counts; metrics count its own samples."""
        groups = sorted({sample.group_id for sample in samples})
        parts = min(self.config.minibatches, len(groups))
        part_of = {group_id: i % parts for i, group_id in enumerate(groups)}
        members = [[s for s in samples if part_of[s.group_id] == part] for part in range(parts)]
        return [
            self.minibatch(
                part,
                StepTotals(
                    num_tokens=totals.num_tokens / parts,
                    num_sequences=totals.num_sequences / parts,
                    measured_tokens=sum(sample.num_targets for sample in part),
                    measured_sequences=len(part),
                ),
            )
            for part in members
        ]

    def minibatch(self, samples: Sequence[Sample], totals: StepTotals) -> Minibatch:
        """This rank's samples of one optimiser step in micro-batches of today's budget."""
        tokens = self.micro_batch_tokens
        numbers = deal(samples, self.world.size, self.policy.token_costs)[self.world.rank]
        own = tuple(samples[n] for n in numbers)
        reported = samples[0].sampler_logprobs is not None
        return Minibatch(own, tuple(numbers), totals, self._pack(own, tokens, reported), tokens)

    def fit(self, minibatch: Minibatch, work: Callable[..., Result], *arguments: Any) -> Result:
        """`work` of the minibatch, again and again in smaller micro-batches until the memory holds it."""
        for attempt, fitted in self.budget.attempts(partial(self.fitted, minibatch)):
            with attempt:
                result = work(fitted, *arguments)
        return result

    def fitted(self, minibatch: Minibatch) -> tuple[Minibatch, int, int]:
        """In micro-batches of today's budget; tokens of the largest of them, and of the longest sequence."""
        tokens = self.micro_batch_tokens
        if tokens < minibatch.max_tokens:
            reported = minibatch.batches[0].sampler_logprobs is not None
            minibatch = minibatch.repacked(self._pack(minibatch.samples, tokens, reported), tokens)
        longest = max((len(s.prompt_ids) + len(s.completion_ids) - 1 for s in minibatch.samples), default=1)
        return minibatch, minibatch.batches[0].input_ids.numel(), longest

    def _pack(
        self, samples: Sequence[Sample], max_tokens: int, sampler_logprobs: bool
    ) -> tuple[PackedBatch, ...]:
        """One at least; as many on every rank where a forward is one of all ranks."""
        device = self.policy.device
        batches = pack(samples, max_tokens=max_tokens, device=device) if samples else []
        count = max(1, len(batches))
        if self.policy.sharded:
            count = max(self.world.together("the micro-batches", lambda: count))
        empty = empty_batch(device, sampler_logprobs=sampler_logprobs)
        return (*batches, *[empty] * (count - len(batches)))

    @torch.no_grad()
    def with_fixed_logprobs(self, minibatch: Minibatch, stale: bool = False) -> Minibatch:
        """Old and reference log-probabilities, each only where the loss needs it.

        The policy moves before a `stale` minibatch's turn, so its old log-probabilities are computed now;
        the first one's are those of its own first forward.
        """
        batches = minibatch.batches
        if self.config.old_logprobs == "sampler":
            minibatch = minibatch.with_values("old_logprobs", [b.sampler_logprobs for b in batches])
        elif stale:
            old = [self.head_outputs(self.policy, batch).logprob for batch in batches]
            minibatch = minibatch.with_values("old_logprobs", old)
        if self.config.loss.needs_reference and not self.config.loss.kl_in_reward:
            self._ready()
            with self.policy.reference() as reference:
                logprobs = [self.head_outputs(reference, batch).logprob for batch in batches]
            minibatch = minibatch.with_values("ref_logprobs", logprobs)
        return minibatch

    def backward(
        self, minibatch: Minibatch, config: GRPOLossConfig
    ) -> tuple[Minibatch, list[dict[str, Tensor]]]:
        """The gradient of a step, and each micro-batch's share of its metrics; the losses add up.

        Before the first update the policy is the old one: its log-probabilities are kept for later epochs.
        """
        self.optimizer.zero_grad()  # of an attempt that failed
        chosen = minibatch
        if self.world.size == 1 and len(minibatch.batches) > 1:  # a single micro-batch chooses by itself
            chosen = self.with_choices(minibatch, config)
        # As old log-probabilities they leave nothing to compare; of a truncated distribution they are biased.
        hides_sampler = self.config.old_logprobs == "sampler" or self.config.rollout.truncations
        shares, logprobs = [], []
        for batch in chosen.batches:
            batch = replace(batch, sampler_logprobs=None) if hides_sampler else batch
            loss = partial(
                packed_loss,
                self.policy,
                batch,
                config,
                totals=chosen.totals,
                temperature=self.config.rollout.temperature,
                optimizer=self.optimizer,
            )
            out = self.policy.run(loss)
            out.loss.backward()
            if self.world.leads or not self.policy.shares_head:  # else all have the same
                shares.append(out.metrics | {"loss": out.loss.detach()})
            logprobs.append(out.logprobs)
        if minibatch.batches[0].old_logprobs is None:
            minibatch = minibatch.with_values("old_logprobs", logprobs)
        return minibatch, shares

    def step(self, shares: Sequence[Mapping[str, Tensor]], config: GRPOLossConfig) -> dict[str, float]:
        """The optimiser's step with the gradient at hand; its metrics from the micro-batches' shares."""
        learning_rate = self.optimizer.learning_rate
        with self.world.at("the optimizer"):
            grad_norm = optimizer_step(self.optimizer)
        of_ranks = self.world.together("the update's metrics", partial(sum_metrics, shares))
        metrics = sum_metrics(of_ranks) | {"grad_norm": grad_norm, "learning_rate": learning_rate}
        if config.use_adaptive_entropy:
            self.entropy_controller.update(metrics["entropy"])
            metrics["entropy_coef"] = config.entropy_coef
        return metrics

    def loss_config(self) -> GRPOLossConfig:
        """The configured loss with what only the run knows."""
        config = self.config.loss
        constant = not config.is_custom and config.aggregation_kind == "constant_length"
        if constant and config.max_completion_length is None:
            config = replace(config, max_completion_length=self.config.rollout.max_completion_length)
        if config.use_adaptive_entropy:
            config = replace(config, entropy_coef=self.entropy_controller.active_coef)
        return config

    def head_outputs(self, policy: Policy, batch: PackedBatch, *outputs: str) -> HeadOutput:
        """(N,) float32 log-probabilities at the sampling temperature, and `outputs` besides."""

        def work() -> HeadOutput:
            hidden, joined, own = policy.at_head(batch)
            head = policy.head
            out = linear_logprob(
                hidden,
                head.weight,
                joined.targets,
                temperature=self.config.rollout.temperature,
                outputs=("logprob", *outputs),
                **head.options,
            )
            return replace(out, **{name: getattr(out, name)[own] for name in ("logprob", *outputs)})

        return policy.run(work)

    def with_choices(self, minibatch: Minibatch, config: GRPOLossConfig) -> Minibatch:
        """The minibatch with what is chosen over the tokens of all micro-batches and ranks, by one forward.

        The cut of `top_entropy_quantile`, and the tokens that clip_cov and kl_cov hold back.
        """
        cuts, holds = config.top_entropy_quantile < 1, not config.is_custom and config.facts.holds_back
        if not (cuts or holds):
            return minibatch
        tokens: dict[int, Tensor] = {}
        for found in self.world.together(
            "the choice of tokens", partial(self.fit, minibatch, self._choice_values, cuts)
        ):
            tokens |= found
        order = sorted(tokens)  # that of one micro-batch: then the same tokens are drawn, too
        logprobs, old_logprobs, advantages, entropies = torch.cat([tokens[n] for n in order]).unbind(1)
        every = torch.ones_like(logprobs, dtype=torch.bool)
        if cuts:
            threshold = entropy_threshold(entropies, every, config.top_entropy_quantile)
            kept = int((entropies >= threshold).sum())
            totals = replace(minibatch.totals, entropy_threshold=threshold, entropy_tokens=kept)
            minibatch = replace(minibatch, totals=totals)
        if holds:
            choose = partial(held_back, logprobs, old_logprobs, advantages, every, config)
            held = self.world.from_lead("the choice of tokens", choose)  # which may draw
            parts = held.split([len(tokens[n]) for n in order])
            minibatch = minibatch.with_samples("held_back", dict(zip(order, parts, strict=True)))
        return minibatch

    @torch.no_grad()
    def _choice_values(self, minibatch: Minibatch, entropy: bool) -> dict[int, Tensor]:
        """Of each sample (C, 4) on the CPU: log-probabilities, old ones, advantages, entropies or zeros."""
        values = []
        for batch in minibatch.batches:
            out = self.head_outputs(self.policy, batch, *["entropy"] * entropy)
            old = out.logprob if batch.old_logprobs is None else batch.old_logprobs
            entropies = torch.zeros_like(old) if out.entropy is None else out.entropy
            values.append(torch.stack([out.logprob, old, batch.advantages, entropies], 1).cpu())
        return minibatch.by_sample(values)

    def sampler_difference(self, samples: Sequence[Sample]) -> float | None:
        """Mean nats a token between log-probabilities of sampler and policy; None: the sampler told none."""
        if samples[0].sampler_logprobs is None:
            return None
        work = partial(self.fit, self.minibatch(samples, StepTotals(0, 0)), self._sampler_differences)
        found = self.world.together("the sampler's log-probabilities", work)
        return sum(total for total, _ in found) / sum(tokens for _, tokens in found)

    @torch.no_grad()
    def _sampler_differences(self, minibatch: Minibatch) -> tuple[float, int]:
        """Their sum, and of how many tokens."""
        with evaluation_mode(self.policy.model):  # without LoRA's dropout, as the engine
            differences = [
                (self.head_outputs(self.policy, batch).logprob - present(batch.sampler_logprobs)).abs()
                for batch in minibatch.batches
            ]
        return sum(d.sum().item() for d in differences), sum(map(len, differences))

    def kl_penalties(self, samples: Sequence[Sample]) -> Tensor:
        """(S,) float32 on the CPU: beta times the KL to the reference, summed over each completion."""
        penalties = torch.zeros(len(samples))
        work = partial(self.fit, self.minibatch(samples, StepTotals(0, 0)), self._kl_penalties)
        for found in self.world.together("the KL to the reference", work):
            for number, penalty in found.items():
                penalties[number] = penalty
        return penalties

    @torch.no_grad()
    def _kl_penalties(self, minibatch: Minibatch) -> dict[int, float]:
        """By the sample's number."""
        self._ready()
        loss, tokens = self.config.loss, []
        for batch in minibatch.batches:
            logprobs = self.head_outputs(self.policy, batch).logprob
            with self.policy.reference() as reference:
                ref_logprobs = self.head_outputs(reference, batch).logprob
            kl = kl_estimate(logprobs, ref_logprobs, loss.kl_estimator or "k1")
            tokens.append((loss.beta * kl).cpu())
        return {number: part.sum().item() for number, part in minibatch.by_sample(tokens).items()}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "entropy_controller": self.entropy_controller.state_dict(),
            "micro_batch_limit": self.budget.limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entropy_controller.load_state_dict(state["entropy_controller"])
        self.budget.limit = state["micro_batch_limit"]


def packed_loss(
    policy: Policy,
    batch: PackedBatch,
    config: GRPOLossConfig | None = None,
    *,
    totals: StepTotals | None = None,
    temperature: float = 1.0,
    optimizer: PolicyOptimizer | None = None,
) -> GRPOLossOutput:
    """`linear_grpo_loss` of a micro-batch, entropy among its metrics; called within `Policy.run`.

    Of a head that the ranks share, all but `logprobs`, (N,) of this batch, is of the tokens of all ranks.

    Args:
        totals: what the losses of a step's micro-batches are divided by; none: the batch's own counts.
        optimizer: to whose gradient of the head the backward adds; none: to the parameter's own.
    """
    hidden, batch, own = policy.at_head(batch)
    head = policy.head
    weight_grad = None if optimizer is None else optimizer.gradient_of(policy.head_weight)
    out = linear_grpo_loss(
        hidden,
        # Detached: a hook on it is the optimizer's own, which is not needed here.
        head.weight if weight_grad is None else head.weight.detach(),
        batch.targets,
        batch.advantages,
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
        group_ids=batch.group_ids,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        held_back=batch.held_back,
        sampler_logprobs=batch.sampler_logprobs,
        totals=totals,
        config=config or GRPOLossConfig(),
        temperature=temperature,
        entropy=True,
        weight_grad=weight_grad,
        **head.options,
    )
    return replace(out, logprobs=present(out.logprobs)[own])
