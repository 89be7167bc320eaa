"""What each command of `grpo-fast` does; it returns the exit code.

A command imports what needs torch when its configuration is known to be right: a mistake shows at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import (
    ConfigError,
    Problem,
    check_filled_in,
    convert_file,
    dump_config,
    load_config,
)
from grpo_fast.data import Prompt, load_prompts
from grpo_fast.evaluate import evaluate as score_answers
from grpo_fast.rollout import Engine, Sampling, make_engine, require_engine, sampling_of
from grpo_fast.stages import resolve_stages

if TYPE_CHECKING:
    from grpo_fast.policy import Policy


def train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast train`"""
    config = load_config(args.config, [*overrides, *(["logging.verbose=true"] if args.verbose else [])])
    if args.print_config:
        from grpo_fast.plan import resolve_auto

        print(dump_config(resolve_auto(config)), end="")
        return 0
    check_filled_in(config)
    from grpo_fast import run

    if args.plain:
        os.environ["TTY_COMPATIBLE"] = "0"  # rich's own switch: plain lines also on a terminal
    ended = run.train(config, resume=args.resume)
    return 0 if ended.stopped_by is None else 128 + ended.stopped_by


def evaluate(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast eval`"""
    config = evaluation_config(args, overrides)
    num_samples = max(args.k) if args.num_samples is None else args.num_samples
    if num_samples < max(args.k):
        message = f"must be at least the largest k, {max(args.k)}"
        raise ConfigError("eval", [Problem("--num-samples", message, num_samples)])
    if args.output and (not Path(args.output).parent.is_dir() or Path(args.output).is_dir()):
        raise ConfigError(
            "eval", [Problem("--output", "must be a file in a folder that is there", args.output)]
        )
    from grpo_fast.cli.show import evaluation_record, evaluation_table
    from grpo_fast.data import load_held_out
    from grpo_fast.distributed.world import ALONE
    from grpo_fast.environments import load_toolsets, make_rollout
    from grpo_fast.rewards import load_rewards
    from grpo_fast.run.export import load_policy_of
    from grpo_fast.run_record.alerts import AlertMonitor
    from grpo_fast.run_record.logs import provenance

    require_engine(config.rollout)
    toolsets = load_toolsets(config.rollout, config.evaluation.dataset or config.dataset)
    rewards = load_rewards(config.rewards, toolsets.classes if toolsets else ())
    rewards.position(config.evaluation.reward)
    source = None if args.model else args.config
    policy, step = load_policy_of(source, config)
    load = load_prompts if config.evaluation.dataset is None else load_held_out
    schemas = toolsets.schemas if toolsets else None
    questions = load(config.evaluation.dataset or config.dataset, policy.tokenizer, schemas)
    rollout = make_rollout(config.rollout, toolsets, policy.tokenizer, policy.eos_token_ids)
    sampling = evaluation_sampling(config, num_samples)
    asked = config.evaluation.model_copy(update={"num_samples": num_samples})
    with engine_for(config, policy, questions, sampling) as engine:
        result = score_answers(engine, questions, rewards, asked, sampling, world=ALONE, rollout=rollout)
        engine_name = engine.name
    print(config.model.path if step is None else f"{source}, step {step}", questions.described, sep="; ")
    print(evaluation_table(result, args.k, sampling.temperature))
    figures = {f"eval/{name}": value for name, value in result.metrics.items()}
    for alert in AlertMonitor(config.alerts).update(0, figures):
        print(alert.text, file=sys.stderr)
    if args.output:
        measured = {
            "model": config.model.path,
            "run": None if step is None else str(source),
            "step": step,
            "dataset": questions.config.model_dump(mode="json"),
            "engine": engine_name,
            "sampling": asdict(sampling),
        }
        record = measured | provenance() | evaluation_record(result, args.k)
        text = json.dumps(record, indent=1, allow_nan=False)
        Path(args.output).write_text(text, encoding="utf-8")
    return 0


def generate(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast generate`"""
    config = load_config(args.config, overrides)
    check_filled_in(config)
    from grpo_fast.cli.show import group_text
    from grpo_fast.environments import load_toolsets, make_rollout
    from grpo_fast.experience import compare, score
    from grpo_fast.plan import resolve_auto
    from grpo_fast.rewards import load_rewards
    from grpo_fast.rollout.types import as_asked
    from grpo_fast.run.export import load_policy_of

    require_engine(config.rollout)
    config = resolve_auto(config)
    toolsets = load_toolsets(config.rollout, config.dataset)
    rewards = load_rewards(config.rewards, toolsets.classes if toolsets else ())
    policy, _ = load_policy_of(args.config, config)
    dataset = load_prompts(config.dataset, policy.tokenizer, toolsets.schemas if toolsets else None)
    rollout = make_rollout(config.rollout, toolsets, policy.tokenizer, policy.eos_token_ids)
    if args.num_prompts > len(dataset):
        message = f"the dataset has {len(dataset)} prompts"
        raise ConfigError("generate", [Problem("--num-prompts", message, args.num_prompts)])
    prompts = dataset[: args.num_prompts]
    print(dataset.described)
    sampling = sampling_of(config.rollout, config.seed)
    with engine_for(config, policy, prompts, sampling) as engine:
        completions = rollout(engine, prompts, int(config.rollout.num_generations), sampling)
    groups = score(prompts, completions, rewards)
    for group in compare(groups, config.advantage, rewards.weights):
        asked = as_asked(group.prompt, group.completions[0])
        rendered = str(policy.tokenizer.decode(list(asked.token_ids)))
        print(group_text(replace(group, prompt=asked), rewards.names, rendered))
    return 0


def groups(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast groups describe`: every stage that groups its prompts in its own way."""
    config = load_config(args.config, overrides)
    from grpo_fast.environments import load_toolsets
    from grpo_fast.groups.sampler import describe_groups
    from grpo_fast.plan import resolve_auto
    from grpo_fast.policy import load_tokenizer

    config = resolve_auto(config)
    tokenizer = load_tokenizer(config.model)
    shown: list[tuple[object, ...]] = []
    for stage in resolve_stages(config):
        rollout = stage.config.rollout
        grouped = (stage.config.dataset, stage.config.groups, stage.config.prompts_per_step)
        settings = (*grouped, rollout.tools, rollout.environment)
        if settings in shown:
            continue
        shown.append(settings)
        if stage.name:
            print(f"stage {stage.name}:")
        toolsets = load_toolsets(rollout, stage.config.dataset)
        description = describe_groups(
            load_prompts(stage.config.dataset, tokenizer, toolsets.schemas if toolsets else None),
            stage.config.groups,
            num_generations=int(rollout.num_generations),
            prompts_per_step=stage.config.prompts_per_step,
            seed=stage.config.seed,
            examples=args.examples,
        )
        print(description)
    return 0


def plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast plan`: 0 where the run fits, 1 where it does not; of several --gpus, on any of them."""
    if args.table is not None:
        return plan_table(args, overrides)
    config = plan_config(args, overrides)
    from rich.console import Console

    from grpo_fast.plan import calibrate, device_budget, longest_prompt, step_sizes, traces_of
    from grpo_fast.plan import plan as make_plan
    from grpo_fast.plan import report as plan_report
    from grpo_fast.plan.borders import borders
    from grpo_fast.plan.scaling import scaling

    device = device_budget(args.gpu)
    devices = [replace(device, ranks=ranks, node=args.gpus_per_node) for ranks in sorted(args.gpus)]
    traces = traces_of(config.model.path, config.model.revision)
    prompt_length = args.prompt_length or config.dataset.max_prompt_length
    if prompt_length is None:
        if args.config is None:
            raise ConfigError("plan", [Problem("--prompt-length", "is required, or CONFIG with its data")])
        prompt_length = longest_prompt(config.dataset, config.model, config.rollout)
    calibration = None
    if args.calibrate:
        if args.gpu is not None:
            message = "measures the device at hand; leave --gpu out"
            raise ConfigError("plan", [Problem("--calibrate", message)])
        sizes = step_sizes(config, prompt_length=prompt_length)
        calibration = calibrate(config, traces.config, device, sizes)
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False)
    if len(devices) > 1:
        steps = scaling(config, traces, devices, prompt_length=prompt_length, calibration=calibration)
        if args.json:
            print(json.dumps([asdict(step) for step in steps], indent=1))
        else:
            console.print(plan_report.render_scaling(steps, device))
        return 0
    found = make_plan(config, traces, devices[0], prompt_length=prompt_length, calibration=calibration)
    if args.json:
        print(json.dumps(plan_report.record(found), indent=1))
    else:
        console.print(plan_report.render(found))
        for line in borders(config, traces, devices[0], prompt_length):
            console.print(line)
    return 0 if found.choice.prediction.free >= 0 else 1


def plan_table(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast plan --table`"""
    if args.model or args.calibrate or args.gpus != [1]:
        raise ConfigError("plan", [Problem("--table", "goes without --model, --gpus and --calibrate")])
    from rich.console import Console

    from grpo_fast.plan import step_sizes
    from grpo_fast.plan.report import render_table
    from grpo_fast.plan.table import GPUS, MODELS, table

    args.model = (models := args.table or MODELS)[0]
    usual = {
        "prompts_per_step": 1,
        "dataset.max_prompt_length": 512,
        "rollout.max_completion_length": 2048,
        "rollout.num_generations": 8,
    }
    given = " ".join(overrides).replace("-", "_")  # under another tool's name, too
    unset = [f"{key}={value}" for key, value in usual.items() if key.rpartition(".")[2] not in given]
    config = plan_config(args, overrides if args.config else [*unset, *overrides])
    sizes = step_sizes(config, prompt_length=args.prompt_length)
    cells = [*table(config, sizes, models, [args.gpu] if args.gpu else GPUS)]
    if args.json:
        print(json.dumps({"step": asdict(sizes), "what_fits": [*map(asdict, cells)]}, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(render_table(cells, sizes))
    return 0


def export(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast export`"""
    from grpo_fast.run.export import export_run

    print(export_run(args.run, args.out))
    return 0


def report(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast report`"""
    from grpo_fast.run_record.report import write_report

    print(write_report(*map(Path, args.runs), to=Path(args.output) if args.output else None))
    return 0


def convert(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast convert`: the configuration on standard output or in a file, the list of keys on stderr."""
    conversion, text = convert_file(args.file, source=args.source)
    print(conversion.listing(), file=sys.stderr)
    if args.output:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError("convert", [Problem("--output", str(error))]) from None
    else:
        print(text, end="")
    return 0


def evaluation_config(args: argparse.Namespace, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of `eval`: a file's, or one made of --model, --dataset and --reward."""
    given = [*overrides, *_override("model.path", args.model)]
    if args.config is not None:
        given += _override("evaluation.dataset.source", args.dataset)
        return load_config(args.config, given + _override("evaluation.reward", args.reward))
    if not (args.model and args.dataset and args.reward):
        message = "is required, or all of --model, --dataset and --reward"
        raise ConfigError("eval", [Problem("CONFIG", message)])
    rewards = f"rewards=[{{reward: {json.dumps(args.reward)}}}]"
    return load_config(None, [*given, *_override("dataset.source", args.dataset), rewards])


def plan_config(args: argparse.Namespace, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of `plan`: a file's, or defaults for --model, whatever they would be trained on."""
    given = [*overrides, *_override("model.path", args.model)]
    if args.config is not None:
        return load_config(args.config, given)
    if not args.model:
        raise ConfigError("plan", [Problem("CONFIG", "is required, or --model")])
    return load_config(None, ["dataset.source=any.jsonl", "rewards=[{reward: length}]", *given])


def _override(key: str, value: str | None) -> list[str]:
    return [f"{key}={json.dumps(value)}"] if value else []


def evaluation_sampling(config: TrainConfig, num_samples: int) -> Sampling:
    """As training evaluates; several answers need a temperature, and take the rollout's where none is set."""
    temperature = config.evaluation.temperature
    if num_samples > 1 and temperature == 0:
        temperature = config.rollout.temperature
    return replace(sampling_of(config.rollout, config.seed), temperature=temperature)


def engine_for(
    config: TrainConfig, policy: Policy, prompts: Sequence[Prompt], sampling: Sampling
) -> AbstractContextManager[Engine]:
    """An engine with room for the longest prompt and its completion."""
    from grpo_fast.data.tasksets import library_prompts
    from grpo_fast.policy import longest_sequence

    ids = (prompt.token_ids for prompt in prompts)
    rendered = library_prompts([config.dataset, config.evaluation.dataset])
    longest = longest_sequence(policy, chain(ids, rendered), sampling.max_completion_length)
    return make_engine(config.rollout, policy, max_length=longest)
