"""What each command of `grpo-fast` does. Heavy libraries are imported inside."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_fast.config_io import ConfigError, Problem, convert_file, dump_config, load_config

if TYPE_CHECKING:
    from grpo_fast.config import TrainConfig
    from grpo_fast.evaluate import Evaluation
    from grpo_fast.rollout import Sampling


def train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast train`"""
    config = load_config(args.config, overrides)
    if args.print_config:
        print(dump_config(config), end="")
        return 0
    from grpo_fast.run import train as train_run

    if args.plain:
        os.environ["TTY_COMPATIBLE"] = "0"  # rich's own switch: plain lines also on a terminal
    train_run(config, resume=args.resume)
    return 0


def evaluate(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast eval`"""
    config = evaluation_config(args, overrides)
    num_samples = max(args.k) if args.num_samples is None else args.num_samples
    if min(args.k) < 1:
        raise ConfigError("eval", [Problem("--k", "must be at least 1", args.k)])
    if num_samples < max(args.k):
        message = f"must be at least the largest k, {max(args.k)}"
        raise ConfigError("eval", [Problem("--num-samples", message, num_samples)])

    from grpo_fast.cli.export import load_policy_of
    from grpo_fast.data import load_prompts
    from grpo_fast.evaluate import evaluate as score
    from grpo_fast.rewards import load_rewards
    from grpo_fast.rollout import make_engine, require_engine

    require_engine(config.rollout)
    rewards = load_rewards(config.rewards)
    policy = load_policy_of(None if args.model else args.config, config)
    questions = load_prompts(config.evaluation.dataset or config.dataset, policy.tokenizer)
    sampling = evaluation_sampling(config, num_samples)
    longest = max(len(question.token_ids) for question in questions) + sampling.max_completion_length
    with make_engine(config.rollout, policy, max_length=longest) as engine:
        result = score(
            engine,
            questions,
            rewards,
            sampling=sampling,
            num_samples=num_samples,
            threshold=config.evaluation.threshold,
            reward_name=config.evaluation.reward,
        )
    print(evaluation_table(result, args.k, sampling.temperature))
    if args.output:
        text = json.dumps(evaluation_record(result, args.k, config), indent=1, allow_nan=False)
        Path(args.output).write_text(text, encoding="utf-8")
    return 0


def generate(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast generate`"""
    config = load_config(args.config, overrides)

    from grpo_fast.cli.export import load_policy_of
    from grpo_fast.cli.preview import show_group
    from grpo_fast.data import load_prompts
    from grpo_fast.experience import compare, score
    from grpo_fast.plan import resolve_auto
    from grpo_fast.rewards import load_rewards
    from grpo_fast.rollout import make_engine, require_engine, sampling_of

    require_engine(config.rollout)
    config = resolve_auto(config)
    rewards = load_rewards(config.rewards)
    policy = load_policy_of(args.config, config)
    prompts = load_prompts(config.dataset, policy.tokenizer)[: args.num_prompts]
    sampling = sampling_of(config.rollout, config.seed)
    longest = max(len(prompt.token_ids) for prompt in prompts) + sampling.max_completion_length
    with make_engine(config.rollout, policy, max_length=longest) as engine:
        completions = engine.generate(
            [prompt.token_ids for prompt in prompts], config.rollout.num_generations, sampling
        )
    groups = score(prompts, completions, rewards)
    for group in compare(groups, config.advantage, rewards.weights):
        print(show_group(group, rewards.names, policy.tokenizer.decode(group.prompt.token_ids)))
    return 0


def groups(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast groups describe`: every stage that groups its prompts in its own way."""
    config = load_config(args.config, overrides)

    from grpo_fast.data import load_prompts
    from grpo_fast.groups.sampler import describe_groups
    from grpo_fast.plan import resolve_auto
    from grpo_fast.policy import load_tokenizer
    from grpo_fast.stages import resolve_stages

    config = resolve_auto(config)
    tokenizer = load_tokenizer(config.model)
    shown: list[tuple[object, ...]] = []
    for stage in resolve_stages(config):
        settings = (stage.config.dataset, stage.config.groups, stage.config.prompts_per_step)
        if settings in shown:
            continue
        shown.append(settings)
        if stage.name:
            print(f"stage {stage.name}:")
        dataset = load_prompts(stage.config.dataset, tokenizer)
        print(
            describe_groups(
                dataset,
                stage.config.groups,
                num_generations=stage.config.rollout.num_generations,
                prompts_per_step=stage.config.prompts_per_step,
                seed=stage.config.seed,
                examples=args.examples,
            )
        )
    return 0


def plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast plan`: 0 where the run fits, 1 where it does not."""
    config = plan_config(args, overrides)

    from rich.console import Console

    from grpo_fast.plan import calibrate, device_budget, model_config, table
    from grpo_fast.plan import plan as make_plan
    from grpo_fast.plan.setup import setup_of, workload_of
    from grpo_fast.plan.traces import Traces

    device = device_budget(args.gpu)
    traces = Traces(model_config(config.model.path, revision=config.model.revision))
    setup = setup_of(config, traces.config, device)
    calibration = None
    if args.calibrate:
        if args.gpu is not None:
            message = "measures the device at hand; leave --gpu out"
            raise ConfigError("plan", [Problem("--calibrate", message)])
        calibration = calibrate(setup, workload_of(config, prompt_length=args.prompt_length))
    found = make_plan(config, traces, device, prompt_length=args.prompt_length, calibration=calibration)
    shown = found, setup, traces.of(config.model).shape, config.model.path
    if args.json:
        print(json.dumps(table.record(*shown), indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 120, markup=False).print(table.render(*shown))
    return 0 if found.prediction.fits else 1


def export(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast export`"""
    from grpo_fast.cli.export import export_run

    print(export_run(args.run, args.out))
    return 0


def report(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast report`"""
    from grpo_fast.run_record.report import write_report

    print(write_report(Path(args.run)))
    return 0


def convert(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast convert`: the configuration on standard output or in a file, the list of keys on stderr."""
    conversion, text = convert_file(args.file, source=args.source)
    print(conversion.listing(), file=sys.stderr)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def doctor(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast doctor`"""
    from grpo_fast.cli.doctor import examine

    diagnosis = examine()
    print(json.dumps(diagnosis.record(), indent=1) if args.json else diagnosis.text())
    return 0 if diagnosis.healthy else 1


def evaluation_config(args: argparse.Namespace, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of `eval`: a file's, or one made of --model, --dataset and --reward."""
    given = list(overrides)
    given += [f"model.path={json.dumps(args.model)}"] if args.model else []
    if args.config is not None:
        given += [f"evaluation.dataset.source={json.dumps(args.dataset)}"] if args.dataset else []
        given += [f"evaluation.reward={json.dumps(args.reward)}"] if args.reward else []
        return load_config(args.config, given)
    if not (args.model and args.dataset and args.reward):
        message = "or all of --model, --dataset and --reward"
        raise ConfigError("eval", [Problem("CONFIG", f"is required, {message}")])
    given += [
        f"dataset.source={json.dumps(args.dataset)}",
        f"rewards=[{{reward: {json.dumps(args.reward)}}}]",
    ]
    return load_config(None, given)


def plan_config(args: argparse.Namespace, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of `plan`: a file's, or defaults for --model, whatever they would be trained on."""
    given = [f"model.path={json.dumps(args.model)}"] if args.model else []
    if args.config is not None:
        return load_config(args.config, [*overrides, *given])
    if not args.model:
        raise ConfigError("plan", [Problem("CONFIG", "is required, or --model")])
    anything = ["dataset.source=any.jsonl", "rewards=[{reward: length}]"]
    return load_config(None, [*anything, *overrides, *given])


def evaluation_sampling(config: TrainConfig, num_samples: int) -> Sampling:
    """As training evaluates; several answers need a temperature, and take the rollout's where none is set."""
    from grpo_fast.rollout import sampling_of

    temperature = config.evaluation.temperature
    if num_samples > 1 and temperature == 0:
        temperature = config.rollout.temperature
    return replace(sampling_of(config.rollout, config.seed), temperature=temperature)


def evaluation_table(result: Evaluation, ks: Sequence[int], temperature: float) -> str:
    """The figures for a person."""
    from grpo_fast.run_record.summary import score_text

    rows = [(f"pass@{k}", score_text(result.pass_at(k), result.interval_at(k))) for k in sorted(set(ks))]
    if result.num_samples > 1:
        rows.append((f"mean@{result.num_samples}", score_text(result.score, result.interval)))
    rows += [("mean reward", f"{result.mean_reward:.4f}"), ("truncated", f"{100 * result.truncated:.1f} %")]
    skipped = f", {result.skipped} more without a score" if result.skipped else ""
    answers = "1 answer" if result.num_samples == 1 else f"{result.num_samples} answers"
    head = (
        f"{result.n} questions{skipped}, {answers} each at temperature {temperature:g}; "
        f"right: {result.reward_name} >= {result.threshold:g}; 95 % intervals over questions"
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join([head, *(f"{name:<{width}}  {value}" for name, value in rows)])


def evaluation_record(result: Evaluation, ks: Sequence[int], config: TrainConfig) -> dict[str, object]:
    """The figures for a program, with every answer; null stands for a score that does not apply."""
    return {
        "model": config.model.path,
        "n": result.n,
        "skipped": result.skipped,
        "num_samples": result.num_samples,
        "reward": result.reward_name,
        "threshold": result.threshold,
        "pass_at": {str(k): result.pass_at(k) for k in ks},
        "intervals": {str(k): result.interval_at(k) for k in ks},
        "mean_at_n": result.score,
        "mean_reward": result.mean_reward,
        "truncated": result.truncated,
        "questions": [
            {
                "index": prompt.index,
                "prompt": prompt.prompt,
                "scores": [None if score != score else score for score in scores],
                "completions": [completion.text for completion in group],
            }
            for prompt, scores, group in zip(result.prompts, result.scores, result.completions, strict=True)
        ],
    }
