"""Update the policy: optimizer steps on one rollout, in micro-batches that fit the memory."""

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
"""Metric of the load-balancing loss of a mixture of experts, before its coefficient."""

Minibatch = tuple[CompletionTable, StepTotals]
"""This rank's completions of one optimizer step, and the counts of all ranks that its loss is divided by."""


class PolicyUpdate:
    """Optimizer steps on completions. After running out of memory, a gradient is repeated in smaller parts.

    Tables, groups and totals are those of all ranks; each rank computes its share.
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
        tokens = int(config.micro_batch_tokens)
        self.annotator = Annotator(policy, micro_batch_tokens=tokens, ready=ready, world=world)
        self.entropy_controller = EntropyController.of(config.loss)
        self.configure(config)

    def configure(self, config: TrainConfig) -> None:
        """Take a stage's configuration; another loss gets a new entropy controller."""
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
        """The loss reads all completions of a group at once."""
        return self.loss.is_custom and self.loss.whole_groups

    @property
    def _drops_out(self) -> bool:
        lora = self.config.model.lora
        return lora is not None and lora.dropout > 0

    @property
    def entropy_coef(self) -> float:
        """Coefficient of the entropy bonus in the next optimizer step."""
        adaptive = self.loss.use_adaptive_entropy
        return self.entropy_controller.active_coef if adaptive else self.loss.entropy_coef

    def run(self, table: CompletionTable, totals: StepTotals, clock: Clock) -> dict[str, float]:
        """Run `num_iterations` epochs of optimizer steps on one rollout, and return their mean metrics."""
        if not len(table):
            return {"update/skipped": 1.0, "learning_rate": self.optimizer.learning_rate}
        minibatches = self.split(table, totals)
        with clock("logprobs"):
            for i, (part, counts) in enumerate(minibatches):
                with self.world.all_succeed("the log-probabilities"):
                    stale = i > 0 or (self.config.num_iterations > 1 and self._drops_out)
                    minibatches[i] = (self.with_fixed_logprobs(part, stale=stale), counts)
        steps = []
        with clock("update"):
            for turn, i in enumerate([*range(len(minibatches))] * self.config.num_iterations):
                part, counts = minibatches[i]
                # Before the first update the policy is the old one, with the dropout of its forward: ratio 1.
                current = turn == 0 and self.config.old_logprobs != "sampler"
                with self.world.all_succeed("the gradient"):
                    given = part.with_columns(old_logprobs=None) if current else part
                    old_logprobs, shares = self.gradient(given, counts, turn)
                known = part.columns.get("old_logprobs", old_logprobs)
                minibatches[i] = (part.with_columns(old_logprobs=known), counts)
                steps.append(self.step(shares))
        return {name: fmean(step[name] for step in steps) for name in steps[0]} | {"update/skipped": 0.0}

    def split(self, table: CompletionTable, totals: StepTotals) -> list[Minibatch]:
        """Split a table into minibatches of whole groups, each with its share of the counts."""
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
        """Return this rank's completions on the device, with the fact `row`, their row among all ranks'."""
        local = table.with_facts(row=torch.arange(len(table)))
        if self.world.size > 1:
            costs, packs = self.policy.token_costs, self.policy.packs
            sets = assign_to_ranks(table, self.world.size, costs, packs, self.whole_groups)
            local = local.select(sets[self.world.rank])
        return local.to(self.policy.device)

    def with_fixed_logprobs(self, table: CompletionTable, stale: bool = False) -> CompletionTable:
        """Add old and reference log-probabilities, where the loss needs them.

        The policy moves before a `stale` minibatch's update, so its old log-probabilities are computed now,
        without LoRA's dropout; those of the first minibatch come from its first forward. The rollout engine's
        log-probabilities are removed where they are the old ones, or those of a truncated distribution.
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
        """Compute the gradient of an optimizer step, summed over micro-batches.

        Returns:
            The old log-probabilities (N,): the table's, or else the policy's. And each micro-batch's metrics.
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
                self.optimizer.zero_grad()  # of a failed attempt
                logprobs = torch.zeros(len(table.token_ids), device=self.policy.device)
                shares = []
                for number, batch in enumerate(batches):
                    seed = derive_seed(self.config.seed, self.world.step, turn, number, self.world.rank)
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
        """Step the optimizer, and sum the metrics over micro-batches and ranks."""
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
        """Return the engine's mean error of a log-probability in nats, or None where it returned none."""
        if "sampler_logprobs" not in table.columns:
            return None
        local = self.local(table)

        def differences() -> tuple[float, int]:
            (logprobs,) = self.annotator.columns(local)
            apart = (logprobs - local.columns["sampler_logprobs"])[local.mask.to(logprobs.device)].abs()
            return apart.double().sum().item(), len(apart)

        sums = self.world.gather_from_all("the sampler's log-probabilities", differences)
        return sum(total for total, _ in sums) / sum(tokens for _, tokens in sums)

    def kl_penalties(self, table: CompletionTable) -> Tensor:
        """Compute beta times the KL to the reference, summed over each completion: (S,) on the CPU."""
        local, loss = self.local(table), self.config.loss

        def penalties() -> dict[str, Tensor]:
            (logprobs,) = self.annotator.columns(local)
            ref_logprobs = self.annotator.reference_logprobs(local)
            kl = loss.beta * kl_estimate(logprobs, ref_logprobs, loss.kl_estimator or "k1")
            return {"rows": local.facts["row"], "penalties": local.sums(kl).cpu()}

        whole = torch.zeros(len(table))
        for part in self.world.gather_tensors("the KL to the reference", penalties):
            whole[part["rows"]] = part["penalties"]
        return whole

    def state_dict(self) -> dict[str, Any]:
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
    """Compute a micro-batch's `linear_grpo_loss`, or its divergence to a teacher, within `Policy.run`.

    Args:
        totals: counts that the losses of a step are divided by; by default those of the batch.
        entropy_coef: replaces the configuration's.
        optimizer: its gradient of the head accumulates the backward; by default the parameter's `grad` does.
        reference: states of the reference for an exact KL.
    """
    routed: list[Tensor] | None = None if policy.router_aux_loss is None else []
    hidden, head = policy.hidden_states(batch, routed=routed), policy.head
    if reference is not None and config is not None and config.distills:
        out = divergence_loss(
            hidden, head, batch, config, totals, reference, temperature=temperature, seed=seed
        )
        return with_balance_loss(out, policy, batch, routed, totals)
    weight_grad = None
    if optimizer is not None and reference is None:  # an exact KL uses the optimizer's hook instead
        weight_grad = optimizer.gradient_of(policy.head_weight)
    out = linear_grpo_loss(
        hidden,
        # Detached, since the optimizer's hook on it is not needed here.
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
    """Compute the divergence to the reference over whole vocabularies, weighted by the aggregation.

    GKD (Agarwal et al. 2023, arXiv:2306.13649), section 3.

    Args:
        hidden: (N, H) of the policy, differentiable.
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
    """Add the load-balancing loss of a mixture of experts, if the policy has one."""
    if routed is None:
        return out
    # Over a step's micro-batches and ranks this is the mean weighted by tokens.
    share = 1.0 if totals is None else len(batch.targets) / (totals.measured_tokens or totals.num_tokens)
    balance = balance_loss(policy.base_model, routed) * share
    loss = out.loss + present(policy.router_aux_loss) * balance.to(out.loss)
    return replace(out, loss=loss, metrics=out.metrics | {AUX_LOSS: balance.detach()})
