"""The command line `grpo-fast`; a command imports the heavy libraries that it needs."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import grpo_fast
from grpo_fast.config.lookup import choices, exits_are_errors, trainer_missing
from grpo_fast.config.paths import user_path

FAILURE, USAGE, INTERRUPTED = 1, 2, 130

CONFIG_HELP = "a YAML file, ours or another tool's, a run's folder, or a recipe (quickstart, ...)"
OVERRIDES_HELP = (
    "Set any key of the configuration by `optimizer.learning_rate=1e-6` or `--optimizer.learning_rate 1e-6`; "
    "flat names of TRL and Axolotl (`learning_rate`, `num_generations`, `beta`, ...) work, too."
)
FIRST_STEPS = (
    "start with `grpo-fast doctor`, then `grpo-fast train quickstart`, which needs no GPU; "
    "`grpo-fast config WORD` finds keys by a word, such as kl, lr or batch_size"
)
REMOVED = {  # commands and options, and what replaces them
    "groups": "`groups describe` was removed: `grpo-fast preview CONFIG --groups` prints the first groups",
    "convert --source": "--source was removed: the tool is recognized by the file's keys; leave it out",
    "plan --gpus-per-node": "--gpus-per-node was removed: the plan counts bytes alone; leave it out",
    "train --changed-code": "--changed-code was removed: --resume accepts edited code, and warns of it",
    "plan --table": "--table was removed: give --model and --gpu once for each model and GPU",
}
ASSIGNMENT = re.compile(r"[A-Za-z_][\w.-]*=")


def split_overrides(parser: argparse.ArgumentParser, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split tokens into those of a command, and overrides of the configuration."""
    own: list[str] = []
    overrides: list[str] = []
    waiting = iter(tokens)
    for token in waiting:
        flag, equals, _ = token.partition("=")
        if action := parser._option_string_actions.get(flag):
            own += [token, next(waiting, "")] if action.nargs is None and not equals else [token]
        elif token.startswith("--") and len(token) > 2:
            if near := difflib.get_close_matches(flag, parser._option_string_actions, 1, 0.85):
                parser.error(f"unknown option {flag}; did you mean {near[0]}?")
            overrides += [token] if equals else [token, *islice(waiting, 1)]
        else:
            (overrides if ASSIGNMENT.match(token) else own).append(token)
    return own, overrides


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    It is 0 for success, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    A training run that a signal stops has saved its last step.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    if tokens[:1] == ["bench"]:  # which parses its arguments
        return bench(tokens[1:])
    with suppress(FileNotFoundError):  # a working directory that was removed
        sys.path += {os.getcwd()} - {*sys.path}  # for the user's modules, as with `python -m grpo_fast`
    args, overrides = parse(tokens)
    # On a CPU it warns of a missing package that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what its encoding does not have
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        module, _, name = args.command.partition(":")
        with exits_are_errors():
            return getattr(importlib.import_module(f"grpo_fast.cli.{module}"), name)(args, overrides)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # such as by `| head`
        sys.stderr.close()
        return FAILURE
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, ModuleNotFoundError) and (advice := trainer_missing(error)):
            print(f"grpo-fast: {tokens[0]} {advice}", file=sys.stderr)
            return FAILURE
        return report_error(error)


def bench(arguments: Sequence[str]) -> int:
    """Run the benchmarks, which parse their arguments and print their errors."""
    try:
        from grpo_fast.benchmarks.__main__ import main
    except ModuleNotFoundError as error:
        if error.name != "grpo_fast.benchmarks":
            raise
        missing = "this installation has no benchmarks; install grpo-fast again"
        print(f"grpo-fast: {missing}, or run `python -m benchmarks` in a checkout", file=sys.stderr)
        return FAILURE
    return main(arguments, program="grpo-fast bench")


def parse(tokens: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's options, and overrides of the configuration; exit with 2 on wrong usage."""
    parser, parsers = build_parser()
    if not tokens or tokens[0].startswith("-"):
        return parser.parse_args(tokens), []
    name, *rest = tokens
    for gone in (name, *(f"{name} {token.partition('=')[0]}" for token in rest)):
        if gone in REMOVED:
            parser.error(REMOVED[gone])
    if name not in parsers:
        hint = f"; `grpo-fast config {name}` finds keys of the configuration"
        parser.error(f"no command {name!r}: {choices(name, parsers)}{hint}")
    command = parsers[name]
    takes_overrides = command.get_default("takes_overrides")
    overrides: list[str] = []
    if takes_overrides:
        rest, overrides = split_overrides(command, rest)
    args, stray = parser.parse_known_args([name, *rest])
    if stray:
        hint = "; a key of the configuration is set by KEY=VALUE" if takes_overrides else ""
        command.error(f"unrecognized arguments: {' '.join(stray)}{hint}")
    return args, overrides


def report_error(error: Exception) -> int:
    """Print an error on one line, and return the exit code."""
    from grpo_fast.config.keys import ConfigError
    from grpo_fast.config.secrets import redacted

    text = str(error).strip()
    ours = type(error).__module__.startswith("grpo_fast.")
    known = ValueError | FloatingPointError | RuntimeError | OSError | ImportError
    if not (text and (ours or isinstance(error, known))):
        text = f"unexpected {type(error).__name__}: {text or 'no message'}; --debug prints the traceback"
    rank = f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"grpo-fast: {rank}{redacted(text)}", file=sys.stderr)
    return USAGE if isinstance(error, ConfigError) else FAILURE


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _path(text: str) -> str:
    try:
        return str(user_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def version() -> str:
    """Return the installed version."""
    try:
        return f"grpo-fast {grpo_fast.__version__}"
    except importlib.metadata.PackageNotFoundError:
        return "grpo-fast, not installed: pip install ."


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the command line's parser, and each command's parser by name."""
    description = "Group-relative policy optimization of language models."
    options: Any = {"prog": "grpo-fast", "description": description, "epilog": FIRST_STEPS}
    parser = argparse.ArgumentParser(**options, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=version(), help="print the version")
    parser.add_argument("--debug", action="store_true", help="print a traceback when a command fails")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: str, text: str, *, overrides: bool = False, **more: Any) -> Callable[..., Any]:
        epilog = OVERRIDES_HELP if overrides else None
        command = parsers.add_parser(name, help=text, epilog=epilog, allow_abbrev=False, **more)
        command.set_defaults(command=run, takes_overrides=overrides)
        return command.add_argument

    count: Any = {"type": _at_least_one}
    switch: Any = {"action": "store_true"}

    option = add("train", "commands:train", "train a model", overrides=True)
    option("config", metavar="CONFIG", help=CONFIG_HELP)
    option("--print-config", **switch, help="print the whole configuration with the plan's choices, and exit")
    resume = "continue the newest run in output_dir from its newest intact checkpoint, or from this one"
    option("--resume", nargs="?", const="latest", metavar="CHECKPOINT", help=resume)
    option(
        "--overwrite", **switch, help="delete the run in output_dir; by default a new run gets a new folder"
    )
    option("--verbose", **switch, help="print all metrics of a step")

    option = add("eval", "questions:evaluate", "pass@1, pass@k and mean@k on a dataset", overrides=True)
    option("config", metavar="CONFIG", help=f"{CONFIG_HELP}; a run: its weights")
    option("--k", **count, nargs="+", default=[1], help="the k of pass@k")
    option(
        "--num-samples", **count, metavar="N", help="completions for each question; default: the largest k"
    )
    option("--output", metavar="FILE", help="write scores and completions as JSON")

    text = "print prompts, completions and rewards before training"
    option = add("preview", "questions:preview", text, overrides=True, aliases=["generate"])
    option("config", metavar="CONFIG", help=CONFIG_HELP)
    option("--num-prompts", **count, metavar="N", help="number of prompts (2)")
    option("--groups", **switch, help="print the first step's baseline groups instead")

    text = "what fits: bytes by part, the largest group, what makes room"
    option = add("plan", "commands:plan", text, overrides=True)
    option("config", nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    option("--model", metavar="MODEL", help="a folder, config.json, hub id, or a known shape as Qwen2.5-1.5B")
    option("--gpu", metavar="GPU", help="H200, RTX-4090, 141GiB, ... or cpu; default: this machine's device")
    option("--gpus", **count, default=1, metavar="N", help="ranks of torchrun, each with a GPU (1)")
    option("--calibrate", **switch, help="first measure the memory of a few layers on this machine's device")
    option("--prompt-length", **count, metavar="P", help="tokens of the longest prompt")
    option("--json", **switch, help="print JSON, with sizes in bytes")

    option = add("export", "commands:export", "write a trained model for transformers and vLLM")
    option("run", type=_path, metavar="RUN_OR_CHECKPOINT", help="a run's folder, or a checkpoint of it")
    option("out", type=_path, metavar="OUT", help="the folder to write; llama.cpp converts it to GGUF")
    option("--adapter", **switch, help="write the LoRA adapter for peft; by default it is merged")
    option(
        "--trust-remote-code", **switch, help="run the Python code of the model's repository, as the run did"
    )

    option = add("report", "commands:report", "write a run's HTML report, or compare several runs")
    option("runs", nargs="+", metavar="RUN", help="a run's folder")
    page = "default: report.html in the run's folder, for several comparison.html"
    option("-o", "--output", type=_path, metavar="OUT", help=page)

    text = "convert a configuration of Axolotl, TRL or NeMo-RL, or a script of TRL or Unsloth; list keys, "
    option = add("convert", "commands:convert", f"{text}exits with 3 where one is left to decide")
    option("file", type=_path, metavar="FILE", help="YAML, JSON, a script or a notebook, which is not run")
    option(
        "-o", "--output", type=_path, metavar="OUT", help="the YAML file to write; default: standard output"
    )

    option = add("config", "reference:config", "describe the keys of the configuration")
    key = "a key, a section, another tool's name, or a word of a key or of a description; default: all"
    option("key", nargs="?", metavar="KEY", help=key)
    option("--markdown", **switch, help="print docs/configuration.md")

    option = add("metrics", "reference:metrics", "describe the metrics of a run")
    option("name", nargs="?", metavar="NAME", help="a metric, or its short name; default: all")
    option("--markdown", **switch, help="print docs/metrics.md")

    add("doctor", "doctor:doctor", "check the installation, device, kernels and rollout engines")
    add("bench", "", "speed, memory and accuracy, ours and the peers'", add_help=False)
    return parser, parsers.choices
