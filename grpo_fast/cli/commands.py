"""Commands of `grpo-fast`; each returns the exit code.

A command validates its configuration before it imports torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.load import check_filled_in, dump_config, load_config
from grpo_fast.config.paths import user_path
from grpo_fast.config.schema import TrainConfig


def train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load_config(args.config, [*overrides, *(["logging.verbose=true"] if args.verbose else [])])
    if args.print_config:
        from grpo_fast.plan import resolve_auto

        print(dump_config(resolve_auto(config)), end="")
        return 0
    check_filled_in(config)
    if args.resume and args.overwrite:
        raise ConfigError("train", [Problem("--overwrite", "contradicts --resume; keep one")])
    print("loading: PyTorch and transformers", file=sys.stderr, flush=True)
    from grpo_fast import run

    named = args.resume == "latest" and user_path(args.config).is_dir()
    resume = config.output_dir if named else args.resume  # this folder, not the newest next to it
    ended = run.train(config, resume=resume, overwrite=args.overwrite)
    return 0 if ended.stopped_by is None else 128 + ended.stopped_by


def plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan; 0 where the run fits, 1 where it does not."""
    config = plan_config(args, overrides)
    from rich.console import Console

    from grpo_fast.plan import device_budget, longest_prompt, measured, shape_of, with_values
    from grpo_fast.plan.report import plan as make_plan
    from grpo_fast.plan.report import record, render
    from grpo_fast.policy.load import resolve_device

    if args.calibrate and args.gpu is not None:
        raise ConfigError("plan", [Problem("--calibrate", "measures this machine's device; leave --gpu out")])
    device = replace(device_budget(args.gpu), ranks=args.gpus)
    shape = shape_of(config.model, device.kind, config.reference)
    prompt_length = args.prompt_length or config.dataset.max_prompt_length
    if prompt_length is None:
        if args.config is None:
            raise ConfigError("plan", [Problem("--prompt-length", "is required, or CONFIG with its data")])
        prompt_length = longest_prompt(config.dataset, config.model, config.rollout)
    config = with_values(config, {"dataset.max_prompt_length": prompt_length})
    if args.calibrate:
        shape = measured(config.model, shape, resolve_device(config.model.device))
    found = make_plan(config, shape, device)
    if args.json:
        print(json.dumps(record(found), indent=1))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120, markup=False)
        console.print(render(found))
    return 0 if found.choice.free >= 0 else 1


def export(args: argparse.Namespace, _: Sequence[str]) -> int:
    from grpo_fast.run.export import export_run

    options = {"adapter": args.adapter, "trust_remote_code": args.trust_remote_code}
    print(export_run(args.run, args.out, **options))
    return 0


def report(args: argparse.Namespace, _: Sequence[str]) -> int:
    from grpo_fast.record.report import write_report

    # Titles and legends have the paths as written.
    runs = (run if run.exists() else user_path(run) for run in map(Path, args.runs))
    print(write_report(*runs, to=Path(args.output) if args.output else None))
    return 0


def convert(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Print or write the converted configuration, and list its keys on stderr; 3 where one is to decide."""
    from grpo_fast.config.convert import convert_file

    conversion, text = convert_file(args.file, output=args.output)
    print(conversion.listing(), file=sys.stderr)
    if args.output:
        try:
            for file, content in conversion.files.items():
                if Path(file).exists() and Path(file).read_text(encoding="utf-8") != content:
                    raise OSError(f"{file} exists and differs; move it, or give another OUT")
            for file, content in {**conversion.files, args.output: text}.items():
                Path(file).write_text(content, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("convert", [Problem("--output", str(error))]) from None
    else:
        print(text, end="")
    return 3 if conversion.open else 0


def plan_config(args: argparse.Namespace, overrides: Sequence[str]) -> TrainConfig:
    """Return the configuration to plan: a file's, or defaults for --model."""
    given = [*overrides, *([f"model.path={json.dumps(args.model)}"] if args.model else [])]
    if args.config is not None:
        return load_config(args.config, given)
    if not args.model:
        raise ConfigError("plan", [Problem("CONFIG", "is required, or --model")])
    return load_config(None, ["dataset.source=any.jsonl", "rewards=[{reward: length}]", *given])
