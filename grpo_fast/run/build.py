"""Build and check the parts of a run from its configuration, at step 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.lookup import choices
from grpo_fast.config.schema import TrainConfig, at
from grpo_fast.config.stages import Stage, resolve_stages, schedule_steps
from grpo_fast.data import PromptDataset, PromptSampler
from grpo_fast.data.files import row_named
from grpo_fast.data.tasksets import library_prompts
from grpo_fast.data.template import turn_ends
from grpo_fast.data.text import hidden_tokens
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.environments import Toolsets, make_rollout
from grpo_fast.environments.tools import ENVIRONMENT_COLUMN
from grpo_fast.groups.sampler import make_sampler
from grpo_fast.groups.weights import AdaptiveWeights
from grpo_fast.head import warm_up
from grpo_fast.loop.algorithm import Algorithm
from grpo_fast.loop.annotate import Annotator
from grpo_fast.loop.columns import check_loss_columns
from grpo_fast.loop.context import TeacherContext
from grpo_fast.loop.trainer import StageParts, Trainer
from grpo_fast.objective import GRPOLossConfig, resolve_loss
from grpo_fast.objective.pairs import custom_loss
from grpo_fast.policy import Policy, PolicyOptimizer, load_policy, longest_sequence
from grpo_fast.policy.host_memory import waiting_on_host
from grpo_fast.policy.load import load_architecture, require_replay, resolve_device
from grpo_fast.policy.optimizer import needs_torchao
from grpo_fast.preference.comparison import comparison_table, mismatched, summed_logprobs, with_order
from grpo_fast.preference.data import CompletionTokenizer, column, load_comparisons
from grpo_fast.preference.trainer import PreferenceTrainer
from grpo_fast.record.callbacks import Callbacks, load_callbacks
from grpo_fast.record.hub import PushToHub
from grpo_fast.record.summary import METRICS, metric_of
from grpo_fast.rewards import RewardError, RewardSet, load_rewards
from grpo_fast.rewards.builtins.options import sought_texts
from grpo_fast.rewards.types import ENVIRONMENTS
from grpo_fast.rollout import Completion, Rollout, chosen_engine, engine_kind, make_engine, require_engine
from grpo_fast.run.alike import require_alike
from grpo_fast.run.loader import Loader, use_threads

logger = logging.getLogger(__name__)
TOOLS = ("rollout.tools", "rollout.environment")  # keys that prompts and rewards depend on
SEEDS_PER_STAGE = 10**9  # so that neither two stages nor runs with neighboring seeds share an order
NOT_OF_A_STEP = ("eval/", "time/", "memory/", "tokens_per_second")  # metrics that follow a step's update

Say = Callable[[str], None]


def build_trainer(config: TrainConfig, world: World = SINGLE_PROCESS, say: Say = lambda _: None) -> Algorithm:
    """Build every part that the configuration names, at step 0; `say` prints what is being loaded.

    Raises:
        ValueError: settings that contradict the model, the data, the rewards or the tokenizer.
        RewardError: a reward asks for a column that the data does not have.
    """
    use_threads(config)
    torch.manual_seed(config.seed)
    needs_torchao(config.optimizer)  # raises before any work where it is missing
    for band in (stage.config.optimizer.band for stage in resolve_stages(config)):
        if band is not None and (metric_of(band.metric) is None or band.metric.startswith(NOT_OF_A_STEP)):
            known = choices(band.metric, [name for name in METRICS if not name.startswith(NOT_OF_A_STEP)])
            raise ValueError(f"optimizer.band.metric = {band.metric!r} is no metric of an update: {known}")
    if config.algorithm == "grpo":
        return build_grpo_trainer(config, world, say)
    if world.size > 1:
        raise ValueError(
            f"algorithm = {config.algorithm!r} trains on one rank, and torchrun has started {world.size}; "
            "start it without torchrun"
        )
    return build_preference_trainer(config, say)


def build_callbacks(config: TrainConfig) -> Callbacks:
    """Load the callbacks; raise ValueError for one that cannot be made, or a hub that refuses the model."""
    hub = [] if config.hub is None else [PushToHub(config.hub)]
    return Callbacks([*load_callbacks(config.callbacks), *hub])


def build_grpo_trainer(config: TrainConfig, world: World, say: Say) -> Trainer:
    require_engine(config.rollout, world.size)
    if config.hub is not None and config.distributed.mode == "shard" and world.size > 1:
        raise ValueError(
            f"hub.push = {config.hub.push!r} writes the model on one rank, and with distributed.mode = "
            "'shard' none has it: leave hub out, and push what `grpo-fast export` writes of the run"
        )
    say(f"loading: the data, {config.dataset.source}")
    loader = Loader(config)  # first, so that errors in the data come before weights are loaded
    toolsets, held_out = loader.eval_toolsets, loader.held_out
    classes = toolsets.classes if toolsets else ()
    eval_rewards = load_rewards(config.rewards, classes, optional=config.loss.distills)
    eval_rewards.position(config.evaluation.reward)  # raises where there is no such reward
    stages = resolve_stages(config)
    for stage in stages:
        resolve_loss(stage.config.loss)  # raises where a custom loss is not found
    require_reference_read(config, [stage.config.loss for stage in stages])
    needs_reference = any(stage.config.keeps_reference for stage in stages)
    if config.rollout.router_replay:
        require_replay(config.model, load_architecture(config.model))
    if held_out is not None:
        try:
            check_columns(eval_rewards, held_out, toolsets)
        except RewardError as error:
            raise ValueError(f"evaluation: {error}") from error
    parts = build_stages(stages, loader)
    sources = {f"stage {i}": part.dataset for i, part in enumerate(parts, 1)}
    sources |= {} if held_out is None else {"evaluation": held_out}
    here = f"{Path.cwd()}/"  # which may differ between ranks
    digests = {
        f"dataset.source = {dataset.config.source.removeprefix(here)!r}, {name}": dataset.digest
        for name, dataset in sources.items()
    }
    require_alike(world, "the data", lambda: digests)
    prompts = [*(held_out or ()), *chain.from_iterable(part.dataset for part in parts)]
    device = resolve_device(config.model.device) if world.size == 1 else world.device
    images = any(prompt.images for prompt in prompts)
    if images:
        require_packed_and_whole(config, world)
    engine_kind(chosen_engine(config.rollout, device)).suits(
        load_architecture(config.model), on_gpu=device.type == "cuda", images=images
    )
    say(f"loading: the model, {config.model.path}")
    policy = load_policy(
        config.model,
        needs_reference=needs_reference,
        reference=config.reference,
        world=world,
        distributed=config.distributed,
        router_replay=config.rollout.router_replay,
    )
    if config.reference.path is not None and any(stage.config.loss.needs_exact_kl for stage in stages):
        require_same_head(policy, config)
    for stage, part in zip(stages, parts, strict=True):
        warn_of_special_tokens(policy, stage.config, part.rewards)
        warm_up_head(policy, stage.config)  # before gradients and the optimizer take their memory

    def rollout_of(config: TrainConfig, dataset: DatasetConfig, toolsets: Toolsets | None) -> Rollout:
        options: Any = {"tokenizer": loader.tokenizer, "end_ids": policy.eos_token_ids}
        chat = dataset.chat_template_kwargs
        return make_rollout(config.rollout, toolsets, chat_options=chat, **options)

    configs = [stage.config for stage in stages]
    parts = tuple(
        replace(part, rollout=rollout_of(own, own.dataset, part.toolsets))
        for part, own in zip(parts, configs, strict=True)
    )
    ids = (prompt.token_ids for prompt in prompts)
    datasets = [config.evaluation.dataset, *(part.dataset.config for part in parts)]
    completion = max(one.rollout.max_completion_length for one in (config, *configs))
    longest = longest_sequence(policy, chain(ids, library_prompts(datasets)), completion)
    with ExitStack() as unless_built:
        say("loading: the rollout engine")
        # The engine starts as it later generates: without the reference on the device.
        with waiting_on_host(policy.reference_weights().values(), device):
            engine = make_engine(config.rollout, policy, max_length=longest, world=world)
            unless_built.enter_context(engine)
            engine.sleep()  # master weights, gradients and a resumed state use its memory until the rollout
        options: Any = {"total_steps": schedule_steps(stages, 0), "on_host": config.memory.offload}
        optimizer = PolicyOptimizer(policy.trainable(), config.optimizer, world=world, **options)
        trainer = Trainer(
            config,
            policy=policy,
            engine=engine,
            optimizer=optimizer,
            stages=parts,
            eval_rewards=eval_rewards,
            eval_rollout_fn=rollout_of(config, config.evaluation.dataset or config.dataset, toolsets),
            held_out=held_out or (),
            world=world,
        )
        unless_built.pop_all()
    return trainer


def require_reference_read(config: TrainConfig, losses: Sequence[GRPOLossConfig]) -> None:
    """Raise ValueError for keys of `reference` that no stage's loss reads."""
    path, template = config.reference.path, config.reference.prompt_template
    read = [loss for loss in losses if loss.needs_reference]
    if path is not None and not read:
        raise ValueError(
            f"reference.path = {path!r} is not read without a KL: set loss.beta, its weight, or method = "
            "opd, or leave it out"
        )
    if template is not None and not (read and all(loss.compares_heads for loss in read)):
        raise ValueError(
            f"reference.prompt_template = {template!r:.70} is read by an exact KL alone: set method = sdft, "
            "or loss.kl_estimator = exact with loss.beta, or leave it out"
        )


def require_same_head(policy: Policy, config: TrainConfig) -> None:
    """Raise ValueError where the reference's head computes logits differently, for an exact KL."""
    with policy.reference() as reference:
        own, other = ((h.logit_scale, h.softcap, h.bias is None) for h in (policy.head, reference.head))
    if own != other:
        raise ValueError(
            f"reference.path = {config.reference.path!r} scales, caps or shifts logits otherwise than the "
            "policy, which loss.kl_estimator = 'exact' does not take: set it to k3, or train by method = opd"
        )


def require_packed_and_whole(config: TrainConfig, world: World) -> None:
    """Raise ValueError for settings that do not support prompts with images."""
    if config.distributed.mode == "shard" and world.size > 1:
        raise ValueError(
            "distributed.mode = 'shard' divides the vision tower's weights, which prompts with images need "
            "whole: set it to replicate"
        )
    if config.reference.prompt_template is not None:
        raise ValueError("reference.prompt_template is text, and the prompts have images: leave it out")
    if config.model.packing == "none":
        raise ValueError("model.packing = 'none' computes no prompts with images: leave it at auto")


def warn_of_special_tokens(policy: Policy, config: TrainConfig, rewards: RewardSet) -> None:
    """Warn of special and end tokens that `rollout.stop` and the rewards search for."""
    hidden = set(hidden_tokens(policy.tokenizer, policy.eos_token_ids).values())
    sought = {f"reward {one.name!r}": "\n".join(sought_texts(one.function)) for one in rewards.rewards}
    sought["rollout.stop"] = "\n".join(config.rollout.stop)
    cut = "is cut from the text of completions, so the reward never sees it: write its tags otherwise"
    for token in policy.tokenizer.added_tokens_decoder.values():
        if not (token.special or token.content in hidden):
            continue
        kind = "a special token" if token.special else "an end token"
        for place in (place for place, text in sought.items() if token.content in text):
            seen = token.content not in hidden or place == "rollout.stop"
            meaning = "is found as one token" if seen else cut
            logger.warning("%s: %r is %s of the tokenizer and %s", place, token.content, kind, meaning)


def warm_up_head(policy: Policy, config: TrainConfig) -> None:
    """Check and compile the kernels of the first step."""
    options: Any = {"implementation": config.model.head, "weight_grad": torch.float32}
    if config.algorithm == "grpo":
        options |= {"loss": config.loss, "temperature": config.rollout.temperature}
    if policy.head_weight.is_cuda:
        policy.run(lambda: warm_up(policy.head, **options))


def build_preference_trainer(config: TrainConfig, say: Say = lambda _: None) -> PreferenceTrainer:
    """Build the trainer with the reference's log-probabilities, whose model then leaves the memory."""
    section, ranks = config.preference, config.algorithm == "rank"
    say(f"loading: the data, {config.dataset.source}")
    for name in (name for name in section.loss.loss_types if ":" in name):
        custom_loss(name)  # raises where it is not found
    loader = Loader(config)
    _, prompts = loader.training(config)
    check_loss_columns(prompts, section.loss.columns, "preference.loss.columns")
    if any(prompt.images for prompt in prompts):
        raise ValueError(
            f"algorithm = {config.algorithm!r} trains on text, and rows of {config.dataset.source} have "
            "images: rename the column by dataset.rename = {image: another_name}, or set algorithm = grpo"
        )
    say(f"loading: the model, {config.model.path}")
    policy = load_policy(config.model)
    warm_up_head(policy, config)
    load = partial(
        load_comparisons,
        tokenizer=loader.tokenizer,
        preference=section,
        ranks=ranks,
        seed=config.seed,
        end_ids=policy.eos_token_ids,
    )
    held_out = None
    if loader.held_out is not None:
        held_out = with_order(comparison_table(load(loader.held_out, held_out=True)))
    rows = load(prompts)
    tables = [comparison_table(rows), *([] if ranks or section.loss.paired else [mismatched(rows)])]
    sequences = (
        torch.cat([table.prompt_of(row), table.tokens_of(row)]).tolist()
        for table in (*tables, *([] if held_out is None else [held_out]))
        for row in range(len(table))
    )
    policy.fix_rope(longest_sequence(policy, sequences))
    annotator = Annotator(policy, micro_batch_tokens=int(config.micro_batch_tokens), whole_groups=True)
    if (section.ranking if ranks else section.loss).needs_reference:
        tables = [table.with_facts(ref_logprob=summed_logprobs(table, annotator)) for table in tables]
    return PreferenceTrainer(
        config,
        annotator=annotator,
        optimizer=PolicyOptimizer(policy.trainable(), config.optimizer, total_steps=config.max_steps),
        prompts=PromptSampler(prompts, config.prompts_per_step, seed=config.seed),
        comparisons=tables[0],
        mismatched=tables[1] if len(tables) > 1 else None,
        held_out=held_out,
    )


def build_stages(stages: Sequence[Stage], loader: Loader) -> tuple[StageParts, ...]:
    """Build the parts of every stage before the first step, so that errors come at once."""
    parts: list[StageParts] = []
    for index, stage in enumerate(stages):
        try:
            parts.append(build_stage(stage, index, parts[-1] if parts else None, loader))
        except ValueError as error:
            raise (ValueError(f"stage {stage.name!r}: {error}") if stage.name else error) from error
    return tuple(parts)


def build_stage(stage: Stage, index: int, before: StageParts | None, loader: Loader) -> StageParts:
    """Return a stage's rewards, their weights and its prompts.

    Objects whose settings equal those of the stage before are shared with it, with their state.
    """
    config = stage.config

    def same(*keys: str) -> bool:
        return before is not None and all(at(config, key) == at(before.stage.config, key) for key in keys)

    if before and same("dataset", *TOOLS):
        toolsets, dataset = before.toolsets, before.dataset
    else:
        toolsets, dataset = loader.training(config)
    if before and same("rewards", *TOOLS):
        rewards = before.rewards
    else:
        classes = toolsets.classes if toolsets else ()
        rewards = load_rewards(config.rewards, classes, optional=config.loss.distills)
    weights = None
    if before and same("rewards", "adaptive_weights", *TOOLS):
        weights = before.adaptive_weights
    elif config.adaptive_weights is not None:
        weights = AdaptiveWeights(config.adaptive_weights, rewards.names, rewards.weights)
    # Pass rates hold for the rewards that measured them.
    measured_by = () if config.curriculum is None else ("rewards",)
    if before and same("dataset", "groups", "curriculum", "prompts_per_step", *measured_by, *TOOLS):
        prompts = before.prompts
    else:
        seed, size = config.seed + index * SEEDS_PER_STAGE, config.prompts_per_step
        prompts = make_sampler(dataset, size, config.groups, config.curriculum, rewards.names, seed=seed)
    check_columns(rewards, dataset, toolsets)
    check_loss_columns(dataset, config.loss.columns)
    given = given_completions(config, dataset, loader) if config.rollout.on_policy_share < 1 else {}
    context = None
    if config.reference.prompt_template is not None:
        context = TeacherContext(config.reference, dataset, loader.tokenizer)
    return StageParts(stage, rewards, dataset, prompts, weights, toolsets, given=given, context=context)


def given_completions(config: TrainConfig, dataset: PromptDataset, loader: Loader) -> dict[int, Completion]:
    """Return the dataset's completion of each prompt, by its row."""
    key, tokenizer = "rollout.max_completion_length", loader.tokenizer
    limit = config.rollout.max_completion_length
    complete = CompletionTokenizer(dataset.config, tokenizer, limit, turn_ends(tokenizer), key)
    completions = {}
    for prompt in dataset:
        with row_named(dataset.config, prompt.index):
            ids = complete(prompt, column(prompt.columns, "completion"), "completion")
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
        completions[prompt.index] = Completion(ids, None, text, truncated=False)
    return completions


def check_columns(rewards: RewardSet, dataset: PromptDataset, toolsets: Toolsets | None) -> None:
    """Raise RewardError, or ValueError for an environment's `reset`, for a column that the run lacks."""
    first = dataset[0].columns
    if toolsets and (instances := toolsets.of(first).instances) is not None:
        instances.check_reset({*first, "prompt"} - {ENVIRONMENT_COLUMN})
    environments = (ENVIRONMENTS,) if toolsets and toolsets.classes else ()
    rewards.check_columns([*first, *environments], dataset)
