"""`grpo-fast eval` and `grpo-fast preview`: sample completions of a policy, and score them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.load import check_filled_in, config_path, load_config
from grpo_fast.config.paths import user_path, with_absolute_paths
from grpo_fast.config.record import CONFIG_FILE
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked
from grpo_fast.config.section import plural, short
from grpo_fast.data.types import spoken, text_of
from grpo_fast.record.summary import score_text
from grpo_fast.rollout import Engine, Sampling, make_engine, require_engine, sampling_of

if TYPE_CHECKING:
    from grpo_fast.data import Prompt, PromptDataset
    from grpo_fast.loop.collect import Group
    from grpo_fast.loop.evaluate import Evaluation
    from grpo_fast.policy import Policy
    from grpo_fast.rewards import RewardSet
    from grpo_fast.rollout.types import Rollout


def evaluate(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Score completions of the held-out questions."""
    config = load_config(args.config, overrides)
    num_samples = max(args.k) if args.num_samples is None else args.num_samples
    if num_samples < max(args.k):
        message = f"must be at least the largest k, {max(args.k)}"
        raise ConfigError("eval", [Problem("--num-samples", message, num_samples)])
    output = user_path(args.output, "--output") if args.output else None
    if output:
        try:
            output.open("ab").close()
        except OSError as error:
            message = f"must be a writable file in an existing folder ({error.strerror})"
            raise ConfigError("eval", [Problem("--output", message, args.output)]) from None
    from grpo_fast.distributed.world import SINGLE_PROCESS
    from grpo_fast.loop.evaluate import evaluate as score_answers
    from grpo_fast.record.alerts import AlertMonitor
    from grpo_fast.record.logs import provenance

    held_out = config.evaluation.dataset is not None
    parts = Parts.load(config, args.config, held_out=held_out)
    asked = config.evaluation.model_copy(update={"num_samples": num_samples})
    questions, sampling = parts.questions, evaluation_sampling(config, num_samples)
    with parts.engine(questions, sampling) as engine:
        options: Any = {"world": SINGLE_PROCESS, "rollout": parts.rollout}
        result = score_answers(engine, questions, parts.rewards, asked, sampling, **options)
    model = config.model.path if parts.step is None else f"{args.config}, step {parts.step}"
    print(model, questions.described, sep="; ")
    if not held_out:
        print("not held out: there is no evaluation.dataset, so the questions are those of the training data")
    print(evaluation_table(result, args.k, sampling.temperature))
    figures = {f"eval/{name}": value for name, value in result.metrics.items()}
    for alert in AlertMonitor(config.alerts).update(0, figures):
        print(alert.text, file=sys.stderr)
    if output:
        measured = {
            "model": config.model.path,
            "run": None if parts.step is None else args.config,
            "step": parts.step,
            "dataset": masked(questions.config.model_dump(mode="json")),
            "held_out": held_out,
            "engine": engine.name,
            "sampling": asdict(sampling),
        }
        record = measured | provenance() | evaluation_record(result, args.k)
        output.write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
    return 0


def preview(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print prompts, completions and rewards before training."""
    config = load_config(args.config, overrides)
    check_filled_in(config)
    if args.groups and args.num_prompts:
        raise ConfigError("preview", [Problem("--num-prompts", "is not allowed with --groups; keep one")])
    from grpo_fast.loop import collect
    from grpo_fast.loop.context import CONTEXT, TeacherContext
    from grpo_fast.plan import resolve_auto

    require_engine(config.rollout)
    config = resolve_auto(config)
    if args.groups:
        from grpo_fast.data.sources import rows_read_once

        with rows_read_once():
            return _preview_groups(config, args.config)
    parts = Parts.load(config, args.config, held_out=False)
    num_prompts = args.num_prompts or 2
    if num_prompts > len(parts.questions):
        message = f"the dataset has {plural(len(parts.questions), 'prompt')}"
        raise ConfigError("preview", [Problem("--num-prompts", message, num_prompts)])
    prompts = parts.questions[:num_prompts]
    print(parts.questions.described)
    if parts.config.dataset.transform is not None:
        print(transform_text(parts.config.dataset, prompts[0]))
    sampling = sampling_of(config.rollout, config.seed)
    with parts.engine(prompts, sampling) as engine:
        completions = parts.rollout(engine, prompts, config.rollout.num_generations, sampling)
    table, penalties = collect.score(prompts, completions, parts.rewards), {}
    if config.advantage.soft_overlong is not None:
        limit = config.rollout.max_completion_length
        penalties[collect.OVERLONG] = collect.overlong_penalties(table, limit, config.advantage.soft_overlong)
    if config.loss.kl_in_reward:
        penalties[collect.KL] = table.facts["reward"].new_zeros(len(table))  # the model is its own reference
        if parts.step is not None:
            print(
                f"{collect.KL} is 0: preview loads no reference model; training subtracts beta times the KL"
            )
    weights = collect.part_weights(parts.rewards.names, parts.rewards.weights, penalties)
    tokenizer = parts.policy.tokenizer
    if not config.loss.distills:
        table = collect.with_penalties(table, penalties)
        table = collect.with_advantages(table, config.advantage, parts.rewards.weights)
    elif config.reference.prompt_template is not None:
        table = TeacherContext(config.reference, parts.questions, tokenizer).of(table)
    contexts = iter(table.objects.get(CONTEXT, ()))
    for group in collect.groups_of(table):
        print(group_text(group, weights, str(tokenizer.decode(list(group.prompt.token_ids)))))
        for number, ids in enumerate(islice(contexts, len(group.completions)), 1):
            seen = "nothing else, so this completion does not train" if ids is None else tokenizer.decode(ids)
            print(f"the teacher of completion {number} reads\n{_block(str(seen))}")
    return 0


def _preview_groups(config: TrainConfig, source: str) -> int:
    """Print the first step's baseline groups; completions are sampled only where the strategy needs them."""
    from grpo_fast.config.stages import resolve_stages
    from grpo_fast.groups.formation import with_enough
    from grpo_fast.groups.sampler import GroupSampler
    from grpo_fast.loop.collect import score
    from grpo_fast.run.build import build_stages
    from grpo_fast.run.loader import Loader, use_threads, with_steps

    use_threads(config)
    config = with_steps(with_absolute_paths(config))
    part = build_stages(resolve_stages(config)[:1], Loader(config))[0]
    config, sampler = part.stage.config, part.prompts
    if not isinstance(sampler, GroupSampler):
        message = "groups.strategy = 'prompt' makes each prompt a group; set another strategy"
        raise ConfigError("preview", [Problem("--groups", message)])
    sampler.begin(0, config.max_steps)
    prompts, table = sampler.next(), None
    if sampler.after_scoring:
        parts, sampling = Parts.load(config, source, held_out=False), sampling_of(config.rollout, config.seed)
        with parts.engine(prompts, sampling) as engine:
            completions = parts.rollout(engine, prompts, config.rollout.num_generations, sampling)
        table = score(prompts, completions, parts.rewards)
    numbers = with_enough(sampler.baseline_groups(prompts, table), config.groups.min_group_size)
    phases = config.groups.phases
    until = f", phase 1 of {len(phases)}, until {phases[0].until:g} of the run" if phases else ""
    when = "after scoring" if table is not None else "before sampling; diversity needs completions"
    print(f"{part.dataset.described}\ngroups.strategy: {sampler.phases[0].strategy}{until}; formed {when}")
    metrics = sampler.metrics(prompts, numbers, table)
    print(", ".join(f"{name.removeprefix('groups/')} {value:.4g}" for name, value in metrics.items()))
    known = sampler.known_of(prompts)
    for number in dict.fromkeys(numbers):
        places = [place for place, own in enumerate(numbers) if own == number]
        first, *others = (known[place] for place in places)
        common = [f"{name} {v}" for name, v in first.items() if all(one.get(name) == v for one in others)]
        if table is not None:
            reward = table.by_group("reward")[places].nanmean().item()
            common.append(f"mean reward {reward_text(reward)}")
        print(f"\n{plural(len(places), 'prompt')}{': ' * bool(common)}{', '.join(common)}")
        for prompt in (prompts[place] for place in places):
            text = prompt.prompt if isinstance(prompt.prompt, str) else text_of(prompt.prompt[-1]["content"])
            print(f"  row {prompt.index}: {short(' '.join(text.split()), 100)}")
    return 0


@dataclass(frozen=True)
class Parts:
    """The policy, its questions, and its rewards."""

    config: TrainConfig
    rewards: RewardSet
    policy: Policy
    step: int | None  # of a run's weights
    questions: PromptDataset
    rollout: Rollout

    @classmethod
    def load(cls, config: TrainConfig, source: str, *, held_out: bool) -> Parts:
        """Load all parts; the weights of the run or checkpoint `source`, if it is one."""
        from grpo_fast.data import load_held_out, load_prompts
        from grpo_fast.environments import load_toolsets, make_rollout
        from grpo_fast.policy import load_policy
        from grpo_fast.rewards import load_rewards
        from grpo_fast.run.export import locate, trained_policy
        from grpo_fast.run.loader import use_threads

        use_threads(config)
        require_engine(config.rollout)
        config = with_absolute_paths(config)
        dataset = config.evaluation.dataset if held_out else None
        toolsets = load_toolsets(config.rollout, dataset or config.dataset)
        optional = config.loss.distills and not held_out
        rewards = load_rewards(config.rewards, toolsets.classes if toolsets else (), optional=optional)
        rewards.position(config.evaluation.reward)  # raises for an unknown reward before any work
        if (folder := user_path(source)).is_dir() and config_path(source).name == CONFIG_FILE:
            policy, step = trained_policy(config, *locate(folder))
        else:
            policy, step = load_policy(config.model), None
        schemas = toolsets.schemas if toolsets else None
        load = load_prompts if dataset is None else load_held_out
        questions = load(dataset or config.dataset, policy.tokenizer, schemas)
        rollout = make_rollout(
            config.rollout,
            toolsets,
            policy.tokenizer,
            policy.eos_token_ids,
            questions.config.chat_template_kwargs,
        )
        return cls(config, rewards, policy, step, questions, rollout)

    def engine(self, prompts: Sequence[Prompt], sampling: Sampling) -> AbstractContextManager[Engine]:
        """Make an engine for the longest prompt and its completion."""
        from grpo_fast.data.tasksets import library_prompts
        from grpo_fast.policy import longest_sequence

        ids = (prompt.token_ids for prompt in prompts)
        rendered = library_prompts([self.config.dataset, self.config.evaluation.dataset])
        longest = longest_sequence(self.policy, chain(ids, rendered), sampling.max_completion_length)
        return make_engine(self.config.rollout, self.policy, max_length=longest)


def evaluation_sampling(config: TrainConfig, num_samples: int) -> Sampling:
    """Return the sampling of an evaluation; several completions take the rollout's temperature if greedy."""
    temperature = config.evaluation.temperature
    if num_samples > 1 and temperature == 0:
        temperature = config.rollout.temperature
    return replace(sampling_of(config.rollout, config.seed), temperature=temperature)


def transform_text(dataset: DatasetConfig, prompt: Prompt) -> str:
    """Describe a row before and after `dataset.transform`, one column per line."""
    from grpo_fast.data.sources import source_row

    after = {dataset.prompt_column: prompt.prompt, **prompt.columns}
    lines = [f"dataset.transform = {dataset.transform!r}, row {prompt.index}"]
    for when, row in {"before": source_row(dataset, prompt.index), "after": after}.items():
        lines += [f"  {when}", *(f"  | {name}: {short(value, 200)}" for name, value in row.items())]
    return "\n".join(lines) + "\n"


def group_text(group: Group, weights: Mapping[str, float], rendered_prompt: str) -> str:
    """Describe the rendered prompt, its completions, and their weighted rewards."""
    head = f"prompt of row {group.prompt.index}, {plural(len(group.prompt.token_ids), 'token')}"
    lines = [head, _block(rendered_prompt)]
    answers = zip(group.completions, group.rewards.tolist(), group.reward_table.tolist(), strict=True)
    for number, (completion, reward, row) in enumerate(answers, 1):
        named = zip(weights.items(), row, strict=True)
        parts = ", ".join(
            f"{name} {reward_text(value)}{f' * {weight:g}' * (weight != 1 and not math.isnan(value))}"
            for (name, weight), value in named
        )
        size = f"{plural(completion.num_sampled, 'token')}{', truncated' * completion.truncated}"
        scored = f"reward {reward_text(reward)} ({parts}), " if row else ""
        lines.append(f"completion {number}: {scored}{size}")
        if completion.episode is None:
            lines.append(_block(completion.text))
        for who, what in spoken(completion.episode.messages) if completion.episode else ():
            lines += [f"  {who}", _block(what)]
    from grpo_fast.groups.advantages import spread_within

    if len(group.rewards) > 1 and weights:
        spread = f"standard deviation {spread_within(group.rewards[None]):.3f}"
        verdict = "all rewards are equal, so this group does not train" if group.flat else spread
        lines.append(f"group: mean reward {reward_text(group.rewards.nanmean().item())}, {verdict}")
    return "\n".join(lines) + "\n"


def reward_text(value: float) -> str:
    """Return `0.500`; NaN is a reward that does not apply."""
    return "not applicable" if math.isnan(value) else f"{value:.3f}"


def _block(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines() or [""])


def evaluation_table(result: Evaluation, ks: Sequence[int], temperature: float) -> str:
    """Format an evaluation as a table."""
    rows = {}
    for k in sorted(set(ks)):
        fewer = "" if (counted := result.counted_at(k)) == result.n else f" of {plural(counted, 'question')}"
        rows[f"pass@{k}"] = score_text(result.pass_at(k), result.interval_at(k)) + fewer
    if result.num_samples > 1:
        rows[f"mean@{result.num_samples}"] = score_text(result.score, result.interval)
    rows["mean reward"] = f"{result.mean_reward:.4f}"
    if len(result.rewards) > 1:
        rows |= {f"mean {name}": reward_text(value) for name, value in result.rewards.items()}
    rows["truncated"] = f"{100 * result.truncated:.1f} %"
    skipped = f", {result.skipped} more without a score" if result.skipped else ""
    head = (
        f"{plural(result.n, 'question')}{skipped}, {plural(result.num_samples, 'answer')} each at "
        f"temperature {temperature:g}; right: {result.criterion}; 95 % intervals over questions"
    )
    width = max(map(len, rows))
    return "\n".join([head, *(f"{name:<{width}}  {value}" for name, value in rows.items())])


def evaluation_record(result: Evaluation, ks: Sequence[int]) -> dict[str, Any]:
    """Return an evaluation as JSON, with all completions; null is a score that does not apply."""
    answers = zip(result.prompts, result.scores, result.completions, strict=True)
    names = ("n", "skipped", "num_samples", "threshold", "mean_reward", "truncated")
    return {name: getattr(result, name) for name in names} | {
        "reward": result.reward_name,
        "mean_rewards": {name: None if mean != mean else mean for name, mean in result.rewards.items()},
        "pass_at": {str(k): result.pass_at(k) for k in ks},
        "intervals": {str(k): result.interval_at(k) for k in ks},
        "mean_at_n": result.score,
        "questions": [
            {
                "index": prompt.index,
                "prompt": prompt.prompt,
                "scores": [None if score != score else score for score in scores],
                "completions": [c.text if c.episode is None else c.episode.messages for c in group],
                "tokens": [completion.num_sampled for completion in group],
            }
            for prompt, scores, group in answers
        ],
    }
