"""The update: optimiser steps over one rollout's completions, in micro-batches that fit the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from grpo_fast.config.schema import TrainConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.head import GRPOLossOutput, HeadParameters, linear_grpo_loss, linear_kl
from grpo_fast.loop.annotate import Annotator, ReferenceStates
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.metrics import sum_metrics
from grpo_fast.objective.terms import EntropyController, kl_estimate
from grpo_fast.objective.types import Segments, present, step_totals, token_weights
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer
from grpo_fast.policy.experts import balance_loss
from grpo_fast.policy.out_of_memory import optimizer_step
from grpo_fast.policy.packing import assign_to_ranks
from grpo_fast.record.logs import Clock
from grpo_fast.rollout.sampling import derive_seed

AUX_LOSS = "router_aux_loss"
"""The metric of a mixture's load-balancing loss, before its coefficient."""

Minibatch = tuple[CompletionTable, StepTotals]
"""This rank's completions of one optimiser step, and the counts of all ranks that its loss is divided by."""


class PolicyUpdate:
    """Optimiser steps over completions. Out of memory, a gradient is computed again in smaller micro-batches.

    Tables, their groups and totals are those of all ranks; each computes a part of them.

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
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.world = world
        self.policy = policy
        self.optimizer = optimizer
        self.config = config
        tokens = int(config.micro_batch_tokens)  # `auto` has become a number
        self.annotator = Annotator(policy, micro_batch_tokens=tokens, ready=ready, world=world)
        self.entropy_controller = EntropyController.of(config.loss)
        self.configure(config)

    def configure(self, config: TrainConfig) -> None:
        """Go on with a stage's configuration; another loss has an entropy controller of its own."""
        if config.loss != self.config.loss:
            self.entropy_controller = EntropyController.of(config.loss)
        self.config, self.loss = config, config.loss
        if self.loss.max_completion_length is None:
            self.loss = replace(self.loss, max_completion_length=config.rollout.max_completion_length)
        self.annotator.configured = int(config.micro_batch_tokens)
        self.annotator.keep_groups(self.whole_groups)
        fewer = " or num_generations, set loss.whole_groups = false" if self.whole_groups else ""
        self.annotator.budget.remedy = f"lower rollout.max_completion_length{fewer}"
        self.annotator.temperature = config.rollout.temperature
        self.annotator.follows_policy = config.reference.weights == "policy"

    @property
    def whole_groups(self) -> bool:
        """Whether the loss sees all completions of a group at once."""
        return self.loss.is_custom and self.loss.whole_groups

    @property
    def _drops_out(self) -> bool:
        lora = self.config.model.lora
        return lora is not None and lora.dropout > 0

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus in the coming optimizer step."""
        return (
            self.entropy_controller.active_coef if self.loss.use_adaptive_entropy else self.loss.entropy_coef
        )

    def run(self, table: CompletionTable, totals: StepTotals, clock: Clock) -> dict[str, float]:
        """`num_iterations` epochs of optimiser steps over one rollout; their mean metrics.

        Raises:
            torch.OutOfMemoryError: not even the longest completion alone fits.
        """
        if not len(table):
            return {"update/skipped": 1.0, "learning_rate": self.optimizer.learning_rate}
        minibatches = self.split(table, totals)
        with clock("logprobs"):
            for i, (own, counts) in enumerate(minibatches):
                with self.world.all_succeed("the log-probabilities"):
                    stale = i > 0 or (self.config.num_iterations > 1 and self._drops_out)
                    minibatches[i] = (self.with_fixed_logprobs(own, stale=stale), counts)
        steps = []
        with clock("update"):
            for turn, i in enumerate([*range(len(minibatches))] * self.config.num_iterations):
                own, counts = minibatches[i]
                # Before the first update the policy is the old one, with the dropout of its forward: ratio 1.
                current = turn == 0 and self.config.old_logprobs != "sampler"
                with self.world.all_succeed("the gradient"):
                    given = own.with_columns(old_logprobs=None) if current else own
                    old_logprobs, shares = self.gradient(given, counts, turn)
                known = own.columns.get("old_logprobs", old_logprobs)
                minibatches[i] = (own.with_columns(old_logprobs=known), counts)
                steps.append(self.step(shares))
        return {name: fmean(step[name] for step in steps) for name in steps[0]} | {"update/skipped": 0.0}

    def split(self, table: CompletionTable, totals: StepTotals) -> list[Minibatch]:
        """Minibatches of whole groups, each with its share of the counts; metrics count what is in it."""
        keys = table.compared if self.whole_groups else table.groups
        groups = keys.unique()
        parts = min(self.config.minibatches, len(groups))
        part_of = torch.searchsorted(groups, keys) % parts
        minibatches = []
        for part in range(parts):
            chosen = table if parts == 1 else table.select((part_of == part).nonzero()[:, 0])
            counts = StepTotals(
                num_tokens=totals.num_tokens / parts,
                num_sequences=totals.num_sequences / parts,
                measured_tokens=int(chosen.num_targets.sum()),
                measured_sequences=len(chosen),
                num_groups=None if totals.num_groups is None else totals.num_groups / parts,
            )
            minibatches.append((self.local(chosen), counts))
        return minibatches

    def local(self, table: CompletionTable) -> CompletionTable:
        """This rank's completions of a table, with the fact `row`, their row among those of all ranks.

        What is known of their tokens goes to the device here, once, and stays there.
        """
        own = table.with_facts(row=torch.arange(len(table)))
        if self.world.size > 1:
            policy = self.policy
            ranks, costs = self.world.size, policy.token_costs
            sets = assign_to_ranks(table, ranks, costs, policy.packs, self.whole_groups)
            own = own.select(sets[self.world.rank])
        return own.to(self.policy.device)

    def with_fixed_logprobs(self, table: CompletionTable, stale: bool = False) -> CompletionTable:
        """With old and reference log-probabilities, each only where the loss needs it.

        The policy moves before a `stale` minibatch's turn, so its old log-probabilities are computed now,
        without LoRA's dropout; the first one's are those of its own first forward, where nothing drops out.
        The sampler's log-probabilities leave the table where they are the old ones themselves, or those of a
        truncated distribution.
        """
        known: dict[str, Tensor | None] = {}
        if self.config.loss.distills:
            return table
        if self.config.old_logprobs == "sampler":
            known = {"old_logprobs": table.columns["sampler_logprobs"], "sampler_logprobs": None}
        else:
            if self.config.rollout.truncations:
                known["sampler_logprobs"] = None
            if stale:
                known["old_logprobs"] = self.annotator.columns(table)[0]
        loss = self.config.loss
        if loss.needs_reference and not (loss.kl_in_reward or loss.compares_heads):
            known["ref_logprobs"] = self.annotator.reference_logprobs(table)
        return table.with_columns(**known)

    def gradient(
        self, table: CompletionTable, totals: StepTotals, turn: int = 0
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """The gradient of a step, whose micro-batches' losses add up.

        Args:
            turn: number of the optimizer step since the rollout. What the head draws differs between turns.

        Returns:
            The old log-probabilities (N,): the table's, or where it has none the policy's, as the first
            update's are. And each micro-batch's share of the metrics.
        """
        loss = partial(
            packed_loss,
            self.policy,
            config=self.loss,
            entropy_coef=self.entropy_coef,
            totals=totals,
            temperature=self.config.rollout.temperature,
            optimizer=self.optimizer,
        )
        for attempt, batches in self.annotator.attempts(table):
            with attempt:
                self.optimizer.zero_grad()  # of an attempt that failed
                logprobs = torch.zeros(len(table.token_ids), device=self.policy.device)
                shares = []
                for number, batch in enumerate(batches):
                    place = self.world.step, turn, number, self.world.rank
                    seed = derive_seed(self.config.seed, *place)
                    if self.loss.compares_heads:
                        loss.keywords["reference"] = self.annotator.reference_states(batch, table)
                    out = self.policy.run(partial(loss, batch, seed=seed))
                    out.loss.backward()
                    shares.append(out.metrics | {"loss": out.loss.detach()})
                    if out.logprobs is not None:
                        logprobs[batch.token_index] = out.logprobs
                if self.policy.routing is not None:
                    shares.append(self.policy.routing.differing())
        return table.columns.get("old_logprobs", logprobs), shares

    def step(self, shares: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The optimiser's step with the gradient at hand; its metrics from the micro-batches' shares."""
        learning_rate, entropy_coef = self.optimizer.learning_rate, self.entropy_coef
        with self.world.at("the optimizer"):
            grad_norm = optimizer_step(self.optimizer)
        of_ranks = self.world.gather_from_all("the update's metrics", partial(sum_metrics, shares))
        metrics = sum_metrics(of_ranks) | {"grad_norm": grad_norm, "learning_rate": learning_rate}
        if "experts/replayed" in metrics:
            differing, replayed = metrics.pop("experts/differing"), metrics.pop("experts/replayed")
            metrics["sampling/experts_differ_mean"] = differing / max(1, replayed)
        if self.loss.use_adaptive_entropy:
            self.entropy_controller.update(metrics["entropy"])
            metrics["entropy_coef"] = entropy_coef
        return metrics

    def sampler_difference(self, table: CompletionTable) -> float | None:
        """Mean nats a token between log-probabilities of sampler and policy; None: the sampler told none."""
        if "sampler_logprobs" not in table.columns:
            return None
        own = self.local(table)

        def differences() -> tuple[float, int]:
            (logprobs,) = self.annotator.columns(own)
            apart = (logprobs - own.columns["sampler_logprobs"])[own.mask.to(logprobs.device)].abs()
            return apart.double().sum().item(), len(apart)

        found = self.world.gather_from_all("the sampler's log-probabilities", differences)
        return sum(total for total, _ in found) / sum(tokens for _, tokens in found)

    def kl_penalties(self, table: CompletionTable) -> Tensor:
        """(S,) float32 on the CPU: beta times the KL to the reference, summed over each completion."""
        own, loss = self.local(table), self.config.loss

        def penalties() -> dict[str, Tensor]:
            (logprobs,) = self.annotator.columns(own)
            ref_logprobs = self.annotator.reference_logprobs(own)
            kl = loss.beta * kl_estimate(logprobs, ref_logprobs, loss.kl_estimator or "k1")
            return {"rows": own.facts["row"], "penalties": own.sums(kl).cpu()}

        whole = torch.zeros(len(table))
        for found in self.world.gather_tensors("the KL to the reference", penalties):
            whole[found["rows"]] = found["penalties"]
        return whole

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "entropy_controller": self.entropy_controller.state_dict(),
            "micro_batch_limit": self.annotator.budget.limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entropy_controller.load_state_dict(state["entropy_controller"])
        self.annotator.budget.limit = state["micro_batch_limit"]


def packed_loss(
    policy: Policy,
    batch: PackedBatch,
    config: GRPOLossConfig | None = None,
    *,
    totals: StepTotals | None = None,
    temperature: float = 1.0,
    entropy_coef: float | None = None,
    optimizer: PolicyOptimizer | None = None,
    seed: int | None = None,
    reference: ReferenceStates | None = None,
) -> GRPOLossOutput:
    """`linear_grpo_loss` of a micro-batch, entropy among its metrics; called within `Policy.run`.

    A distillation is `divergence_loss` instead.

    Args:
        totals: what the losses of a step's micro-batches are divided by; none: the batch's own counts.
        entropy_coef: in place of the configuration's.
        optimizer: to whose gradient of the head the backward adds; none: to the parameter's own.
        seed: as `linear_grpo_loss` takes it.
        reference: what an exact KL reads of the reference.
    """
    routed: list[Tensor] | None = None if policy.router_aux_loss is None else []
    hidden, head = policy.hidden_states(batch, routed=routed), policy.head
    if reference is not None and config is not None and config.distills:
        out = divergence_loss(
            hidden, head, batch, config, totals, reference, temperature=temperature, seed=seed
        )
        return with_balance_loss(out, policy, batch, routed, totals)
    weight_grad = None
    if optimizer is not None and reference is None:  # an exact KL hands its gradient to the optimizer's hook
        weight_grad = optimizer.gradient_of(policy.head_weight)
    out = linear_grpo_loss(
        hidden,
        # Detached: a hook on it is the optimizer's own, which is not needed here.
        head.weight if weight_grad is None else head.weight.detach(),
        batch.targets,
        batch.columns["advantages"],
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
        group_ids=batch.group_ids,
        columns=batch.columns,
        totals=totals,
        config=config,
        entropy_coef=entropy_coef,
        temperature=temperature,
        entropy=True,
        weight_grad=weight_grad,
        seed=seed,
        **({} if reference is None else reference.operands(head)),
        **head.options,
    )
    return with_balance_loss(out, policy, batch, routed, totals)


def divergence_loss(
    hidden: Tensor,
    head: HeadParameters,
    batch: PackedBatch,
    config: GRPOLossConfig,
    totals: StepTotals | None,
    reference: ReferenceStates,
    **options: Any,
) -> GRPOLossOutput:
    """Return the divergence to the reference over whole vocabularies, summed with the aggregation's weights.

    GKD (Agarwal et al. 2023, arXiv:2306.13649), section 3.

    Args:
        hidden: (N, H) of the policy, differentiable.
        totals: as `packed_loss` takes it.
        options: of `linear_kl`.
    """
    counted = torch.ones_like(batch.targets, dtype=torch.bool)
    out = linear_kl(
        hidden,
        head.weight,
        counted,
        direction="jsd",
        beta=config.jsd_beta,
        **reference.operands(head),
        **reference.scaling(head),
        **options,
        **head.options,
    )
    divergence = out.divergence
    segments = Segments.of(batch.sequence_ids, counted, batch.num_sequences, divergence.dtype)
    totals = totals or step_totals(counted, batch.num_sequences)
    weights = token_weights(config.aggregation_kind, segments, totals, config.max_completion_length)
    tokens = totals.num_tokens if totals.measured_tokens is None else totals.measured_tokens
    means = token_weights("token_mean", segments, StepTotals(tokens, totals.num_sequences))
    metrics = {"divergence": (means * divergence.detach()).sum()}
    return GRPOLossOutput((weights * divergence).sum(), metrics, certificate=out.certificate)


def with_balance_loss(
    out: GRPOLossOutput,
    policy: Policy,
    batch: PackedBatch,
    routed: list[Tensor] | None,
    totals: StepTotals | None,
) -> GRPOLossOutput:
    """Add a mixture's load-balancing loss, where the policy asks for one, of a forward's router logits."""
    if routed is None:
        return out
    # Of a step's micro-batches, and ranks, a mean with their tokens as weights.
    share = 1.0 if totals is None else len(batch.targets) / (totals.measured_tokens or totals.num_tokens)
    balance = balance_loss(policy.base_model, routed) * share
    loss = out.loss + present(policy.router_aux_loss) * balance.to(out.loss)
    return replace(out, loss=loss, metrics=out.metrics | {AUX_LOSS: balance.detach()})
