"""`grpo-fast`: the command line. Heavy libraries are imported by the command that needs them."""

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

CONFIG_HELP = "a YAML file, ours or another tool's, a run's directory, or a shipped recipe (quickstart, ...)"
OVERRIDES_HELP = (
    "Any key of the configuration may be given after the options, as `optimizer.learning_rate=1e-6` or "
    "`--optimizer.learning_rate 1e-6`; TRL's and Axolotl's flat names (`learning_rate`, `num_generations`, "
    "`beta`, ...) work too."
)
FIRST_STEPS = (
    "begin with `grpo-fast doctor`, then `grpo-fast train quickstart`, which needs no GPU; "
    "`grpo-fast config WORD` finds keys by a word, as kl, lr or batch_size"
)
REMOVED = {  # commands and options that are gone, and what replaces them
    "groups": "`groups describe` was removed: `grpo-fast preview CONFIG --groups` prints the first groups",
    "plan --gpus-per-node": "--gpus-per-node was removed: the plan counts bytes alone; leave it out",
    "plan --table": "--table was removed: give --model and --gpu once for each model and GPU",
}
ASSIGNMENT = re.compile(r"[A-Za-z_][\w.-]*=")


def split_overrides(parser: argparse.ArgumentParser, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (a command's own tokens, overrides of the configuration)."""
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
    """Run one command; the exit code is 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM,
    129 SIGHUP.

    A training run that a signal stops has saved its last step all the same.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in tokens
    if debug:
        tokens.remove("--debug")
    if tokens[:1] == ["bench"]:  # its arguments are its own
        return bench(tokens[1:])
    with suppress(FileNotFoundError):  # a working directory that was removed
        sys.path += {os.getcwd()} - {*sys.path}  # for the user's modules, as with `python -m grpo_fast`
    args, overrides = parse(tokens)
    # On a CPU it asks for a package of kernels that nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding has not is printed as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        module, _, name = args.command.partition(":")
        with exits_are_errors():
            return getattr(importlib.import_module(f"grpo_fast.cli.{module}"), name)(args, overrides)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        sys.stderr.close()
        return FAILURE
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, ModuleNotFoundError) and (told := trainer_missing(error)):
            print(f"grpo-fast: {tokens[0]} {told}", file=sys.stderr)
            return FAILURE
        return report_error(error)


def bench(arguments: Sequence[str]) -> int:
    """`grpo-fast bench`: the benchmarks parse their own arguments and print their own errors."""
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
    """(what the command's own options say, overrides of the configuration); leaves with 2 on wrong usage."""
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
    """One sentence on stderr; the exit code."""
    from grpo_fast.config.keys import ConfigError
    from grpo_fast.config.secrets import redacted

    text = str(error).strip()
    ours = type(error).__module__.startswith("grpo_fast.")
    told = ValueError | FloatingPointError | RuntimeError | OSError | ImportError
    if not (text and (ours or isinstance(error, told))):
        text = f"unexpected {type(error).__name__}: {text or 'no message'}; --debug shows the traceback"
    rank = f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"grpo-fast: {rank}{redacted(text)}", file=sys.stderr)
    return USAGE if isinstance(error, ConfigError) else FAILURE


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an option that counts."""

    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} must be at least {minimum}")
        return value

    return number


def path(text: str) -> str:
    """The type of an option that takes a file or folder."""
    try:
        return str(user_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def version() -> str:
    """Name the installed version; a checkout that is not installed has none."""
    try:
        return f"grpo-fast {grpo_fast.__version__}"
    except importlib.metadata.PackageNotFoundError:
        return "grpo-fast, not installed: pip install ."


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The whole command line, and each command's own parser by name."""
    description = "Group-relative policy optimisation of language models."
    options: Any = {"prog": "grpo-fast", "description": description, "epilog": FIRST_STEPS}
    parser = argparse.ArgumentParser(**options, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=version(), help="print the version")
    parser.add_argument("--debug", action="store_true", help="show a traceback when a command fails")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: str, text: str, overrides: bool = False, **more: Any) -> argparse.ArgumentParser:
        epilog = OVERRIDES_HELP if overrides else None
        command = parsers.add_parser(name, help=text, epilog=epilog, allow_abbrev=False, **more)
        command.set_defaults(command=run, takes_overrides=overrides)
        return command

    train = add("train", "commands:train", "train a model", overrides=True)
    train.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    whole = "print the whole configuration, with what the plan chooses, and leave"
    train.add_argument("--print-config", action="store_true", help=whole)
    resume = "continue from the newest intact checkpoint of the newest run in output_dir, or from this one"
    train.add_argument("--resume", nargs="?", const="latest", metavar="CHECKPOINT", help=resume)
    overwrite = "delete the run in output_dir; else a new run gets a folder next to it"
    train.add_argument("--overwrite", action="store_true", help=overwrite)
    train.add_argument("--changed-code", action="store_true", help=argparse.SUPPRESS)
    train.add_argument("--verbose", action="store_true", help="print every metric of a step")

    evaluate = add("eval", "questions:evaluate", "pass@1, pass@k and mean@k on a dataset", overrides=True)
    evaluate.add_argument("config", metavar="CONFIG", help=f"{CONFIG_HELP}; a run: its weights")
    evaluate.add_argument("--k", type=at_least(1), nargs="+", default=[1], help="the k of pass@k")
    evaluate.add_argument(
        "--num-samples", type=at_least(1), metavar="N", help="answers a question; the largest k"
    )
    evaluate.add_argument("--output", metavar="FILE", help="write figures, scores and answers as JSON")

    look = "look at prompts, completions and rewards before training"
    preview = add("preview", "questions:preview", look, overrides=True, aliases=["generate"])
    preview.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    shown = preview.add_mutually_exclusive_group()
    shown.add_argument("--num-prompts", type=at_least(1), default=2, metavar="N", help="prompts to show (2)")
    shown.add_argument("--groups", action="store_true", help="show the first step's baseline groups")

    fits = "what fits: bytes by part, the largest group and the longest completion, what makes room"
    plan = add("plan", "commands:plan", fits, overrides=True)
    plan.add_argument("config", nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    model = "a folder, config.json, hub id, or a known shape as Qwen2.5-1.5B"
    plan.add_argument("--model", metavar="MODEL", help=model)
    gpu = "H200, RTX-4090, 141GiB, ... or cpu; default: the device at hand"
    plan.add_argument("--gpu", metavar="GPU", help=gpu)
    ranks = "ranks that torchrun starts, each with a GPU of its own (1)"
    plan.add_argument("--gpus", type=at_least(1), default=1, metavar="N", help=ranks)
    calibrate = "first measure what a few layers keep on the device at hand"
    plan.add_argument("--calibrate", action="store_true", help=calibrate)
    plan.add_argument("--prompt-length", type=at_least(1), metavar="P", help="tokens of the longest prompt")
    plan.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")

    export = add("export", "commands:export", "write a trained model for transformers and vLLM")
    export.add_argument(
        "run", type=path, metavar="RUN_OR_CHECKPOINT", help="a run's directory, or one checkpoint of it"
    )
    export.add_argument(
        "out", type=path, metavar="OUT", help="the folder to write; llama.cpp makes GGUF of it"
    )
    adapter = "write LoRA's adapter alone, for peft; else it is merged"
    export.add_argument("--adapter", action="store_true", help=adapter)
    trust = "run the Python code that the model's repository ships, where the run did"
    export.add_argument("--trust-remote-code", action="store_true", help=trust)

    report = add("report", "commands:report", "write a run's HTML report, or one that compares several")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory")
    page = "the page; default: report.html in the run's directory, comparison.html here for several"
    report.add_argument("-o", "--output", type=path, metavar="OUT", help=page)

    foreign = "turn an Axolotl, TRL or NeMo-RL configuration into ours, or a TRL or Unsloth script"
    foreign += (
        ", listing each key; leaves with 3 where something is to be decided before it is the same experiment"
    )
    convert = add("convert", "commands:convert", foreign)
    convert.add_argument(
        "file", type=path, metavar="FILE", help="YAML, JSON, or a script or notebook, which is not run"
    )
    convert.add_argument(
        "-o", "--output", type=path, metavar="OUT", help="the YAML file to write, else standard output"
    )
    sources = ("axolotl", "trl", "nemo_rl")
    convert.add_argument("--source", choices=sources, help="default: recognised by its keys")

    every = "what can be configured: every key, or one, with its meaning and what other tools call it"
    reference = add("config", "reference:config", every)
    key = "a key, a section, another tool's name, or a word of one or of a meaning; default: all"
    reference.add_argument("key", nargs="?", metavar="KEY", help=key)
    reference.add_argument("--markdown", action="store_true", help="all as docs/configuration.md has it")

    meanings = add("metrics", "reference:metrics", "what each metric of a run means")
    meanings.add_argument(
        "name", nargs="?", metavar="NAME", help="a metric, or its word on a terminal; default: all"
    )
    meanings.add_argument("--markdown", action="store_true", help="all as docs/metrics.md has it")

    add("doctor", "doctor:doctor", "what is installed, which device, which kernels and engines")
    add("bench", "", "speed, memory and accuracy, ours and the peers'", add_help=False)
    return parser, parsers.choices
