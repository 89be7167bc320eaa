"""What each command of `grpo-fast` does; it returns the exit code.

A command imports what needs torch when its configuration is known to be right: a mistake shows at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.load import check_filled_in, dump_config, load_config
from grpo_fast.config.schema import TrainConfig


def train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load_config(args.config, [*overrides, *(["logging.verbose=true"] if args.verbose else [])])
    if args.print_config:
        from grpo_fast.plan import resolve_auto

        print(dump_config(resolve_auto(config)), end="")
        return 0
    check_filled_in(config)
    if args.changed_code:
        gone = "is gone: --resume goes on with edited code, and warns of it; leave it out"
        raise ConfigError("train", [Problem("--changed-code", gone)])
    from grpo_fast import run

    ended = run.train(config, resume=args.resume)
    return 0 if ended.stopped_by is None else 128 + ended.stopped_by


def groups(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast groups describe`: every stage that groups its prompts in its own way."""
    config = load_config(args.config, overrides)
    from grpo_fast.config.stages import resolve_stages
    from grpo_fast.groups.sampler import describe_groups
    from grpo_fast.plan import resolve_auto
    from grpo_fast.run.loader import Loader

    config = resolve_auto(config)
    loader = Loader(config)
    shown: list[tuple[object, ...]] = []
    for stage in resolve_stages(config):
        of, rollout = stage.config, stage.config.rollout
        settings = (of.dataset, of.groups, of.prompts_per_step, rollout.tools, rollout.environment)
        if settings in shown:
            continue
        shown.append(settings)
        if stage.name:
            print(f"stage {stage.name}:")
        _, prompts = loader.training(of)
        size, per_step = int(rollout.num_generations), of.prompts_per_step
        options: Any = {"num_generations": size, "prompts_per_step": per_step, "seed": of.seed}
        print(describe_groups(prompts, of.groups, examples=args.examples, **options))
    return 0


def plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast plan`: 0 where the run fits, 1 where it does not; of several --gpus, on any of them."""
    if args.table is not None:
        return plan_table(args, overrides)
    config = plan_config(args, overrides)
    from rich.console import Console

    from grpo_fast.plan import calibrated, device_budget, longest_prompt, shapes_of, with_values
    from grpo_fast.plan import plan as make_plan
    from grpo_fast.plan.report import record, render
    from grpo_fast.plan.scaling import render_scaling, scaling

    if args.calibrate and args.gpu is not None:
        raise ConfigError("plan", [Problem("--calibrate", "measures the device at hand; leave --gpu out")])
    device = device_budget(args.gpu)
    shapes = shapes_of(config.model.path, config.model.revision)
    prompt_length = args.prompt_length or config.dataset.max_prompt_length
    if prompt_length is None:
        if args.config is None:
            raise ConfigError("plan", [Problem("--prompt-length", "is required, or CONFIG with its data")])
        prompt_length = longest_prompt(config.dataset, config.model, config.rollout)
    config = with_values(config, {"dataset.max_prompt_length": prompt_length})
    if args.calibrate:
        device = calibrated(config, shapes, device)
    devices = [replace(device, ranks=ranks, node=args.gpus_per_node) for ranks in sorted(args.gpus)]
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False)
    if len(devices) > 1:
        steps = scaling(config, shapes, devices)
        if args.json:
            print(json.dumps([asdict(step) for step in steps], indent=1))
        else:
            console.print(render_scaling(steps, device))
        return 0
    found = make_plan(config, shapes, devices[0])
    if args.json:
        print(json.dumps(record(found), indent=1))
    else:
        console.print(render(found))
    return 0 if found.choice.free >= 0 else 1


def plan_table(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """`grpo-fast plan --table`"""
    if args.model or args.calibrate or args.gpus != [1]:
        raise ConfigError("plan", [Problem("--table", "goes without --model, --gpus and --calibrate")])
    from rich.console import Console

    from grpo_fast.plan import step_sizes, with_values
    from grpo_fast.plan.report import GPUS, MODELS, render_table, table

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
    if args.prompt_length:
        config = with_values(config, {"dataset.max_prompt_length": args.prompt_length})
    sizes, cells = step_sizes(config), [*table(config, models, [args.gpu] if args.gpu else GPUS)]
    if args.json:
        print(json.dumps({"step": asdict(sizes), "what_fits": [*map(asdict, cells)]}, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(render_table(cells, sizes))
    return 0


def export(args: argparse.Namespace, _: Sequence[str]) -> int:
    from grpo_fast.run.export import export_run

    print(export_run(args.run, args.out))
    return 0


def report(args: argparse.Namespace, _: Sequence[str]) -> int:
    from grpo_fast.record.report import write_report

    print(write_report(*map(Path, args.runs), to=Path(args.output) if args.output else None))
    return 0


def convert(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast convert`: the configuration on standard output or in a file, the list of keys on stderr; 3
    where a person has to decide something before it is the same experiment."""
    from grpo_fast.config.convert import convert_file

    conversion, text = convert_file(args.file, source=args.source)
    print(conversion.listing(), file=sys.stderr)
    if args.output:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError("convert", [Problem("--output", str(error))]) from None
    else:
        print(text, end="")
    return 3 if conversion.open else 0


def plan_config(args: argparse.Namespace, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of `plan`: a file's, or defaults for --model, whatever they would be trained on."""
    given = [*overrides, *([f"model.path={json.dumps(args.model)}"] if args.model else [])]
    if args.config is not None:
        return load_config(args.config, given)
    if not args.model:
        raise ConfigError("plan", [Problem("CONFIG", "is required, or --model")])
    return load_config(None, ["dataset.source=any.jsonl", "rewards=[{reward: length}]", *given])
