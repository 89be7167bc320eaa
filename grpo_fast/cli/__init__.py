"""`grpo-fast`: the command line. Heavy libraries are imported by the command that needs them."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130

CONFIG_HELP = "a YAML file, a run's directory, or the name of a shipped recipe (quickstart, gsm8k, dpo, rank)"
OVERRIDES_HELP = (
    "Any key of the configuration may be given after the options, as `optimizer.learning_rate=1e-6` or "
    "`--optimizer.learning_rate 1e-6`; TRL's and Axolotl's flat names (`learning_rate`, `num_generations`, "
    "`beta`, ...) work too."
)
FIRST_STEPS = "begin with `grpo-fast doctor`, then `grpo-fast train quickstart`, which needs no GPU"
ASSIGNMENT = re.compile(r"[A-Za-z_][\w.-]*=")


class Parser(argparse.ArgumentParser):
    """An argument parser that knows its own options, to tell them from overrides of the configuration."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.takes_one_value: dict[str, bool] = {}  # by option string
        super().__init__(*args, allow_abbrev=False, **settings)

    def add_argument(self, *flags: str, **settings: Any) -> argparse.Action:
        action = super().add_argument(*flags, **settings)
        self.takes_one_value.update(dict.fromkeys(action.option_strings, action.nargs is None))
        return action

    def split_overrides(self, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
        """(this parser's own tokens, overrides of the configuration)."""
        own: list[str] = []
        overrides: list[str] = []
        waiting = iter(tokens)
        for token in waiting:
            flag, equals, _ = token.partition("=")
            if flag in self.takes_one_value:
                own.append(token)
                own += [next(waiting, "")] if self.takes_one_value[flag] and not equals else []
            elif token.startswith("--") and len(token) > 2:
                self._refuse_misspelt_option(flag)
                overrides.append(token)
                value = None if equals else next(waiting, None)
                overrides += [] if value is None else [value]
            else:
                (overrides if ASSIGNMENT.match(token) else own).append(token)
        return own, overrides

    def _refuse_misspelt_option(self, flag: str) -> None:
        near = difflib.get_close_matches(flag, self.takes_one_value, 1, 0.85)
        if near:
            self.error(f"unknown option {flag}; did you mean {near[0]}?")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 done, 1 failed, 2 wrong usage or configuration, 130 Ctrl-C.

    A training run that a signal stops has saved its last step, and leaves with 0.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    parser, commands = build_parser()
    debug = "--debug" in tokens
    if debug:
        tokens.remove("--debug")
    if tokens[:1] == ["bench"]:  # its arguments are its own
        return bench(tokens[1:])
    args, overrides = parse(tokens, parser, commands)
    try:
        return run_command(args, overrides)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        sys.stderr.close()
        return FAILURE
    except Exception as error:
        if debug:
            traceback.print_exc()
        return report_error(error)


def parse(
    tokens: Sequence[str], parser: Parser, commands: Mapping[str, Parser]
) -> tuple[argparse.Namespace, list[str]]:
    """(what the command's own options say, overrides of the configuration); leaves with 2 on wrong usage."""
    if not tokens or tokens[0].startswith("-"):
        return parser.parse_args(tokens), []
    name, *rest = tokens
    if name not in commands:
        near = difflib.get_close_matches(name, commands, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"
        parser.error(f"no command {name!r}; {hint}")
    command = commands[name]
    overrides: list[str] = []
    if command.get_default("takes_overrides"):
        rest, overrides = command.split_overrides(rest)
    args, stray = parser.parse_known_args([name, *rest])
    if stray:
        hint = "; a key of the configuration is set by KEY=VALUE" if "takes_overrides" in args else ""
        command.error(f"unrecognized arguments: {' '.join(stray)}{hint}")
    return args, overrides


def bench(arguments: Sequence[str]) -> int:
    """Hand over to the benchmarks, which parse their own arguments and print their own errors."""
    try:
        benchmarks = importlib.import_module("grpo_fast.benchmarks.__main__")
    except ModuleNotFoundError as error:
        if error.name != "grpo_fast.benchmarks":
            raise
        print(
            "grpo-fast: this installation has no benchmarks; install grpo-fast again, or run "
            "`python -m benchmarks` in a checkout",
            file=sys.stderr,
        )
        return FAILURE
    return benchmarks.main(arguments, program="grpo-fast bench")


def run_command(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from grpo_fast.cli import commands

    return getattr(commands, args.handler)(args, overrides)


def report_error(error: Exception) -> int:
    """One sentence on stderr; the exit code."""
    from grpo_fast.config_io import ConfigError

    text = str(error).strip()
    ours = type(error).__module__.startswith("grpo_fast.")
    if not (text and (ours or isinstance(error, ValueError | RuntimeError | OSError | ImportError))):
        text = f"unexpected {type(error).__name__}: {text or 'no message'}; --debug shows the traceback"
    print(f"grpo-fast: {text}", file=sys.stderr)
    return USAGE if isinstance(error, ConfigError) else FAILURE


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and each command's own parser by name."""
    parser = Parser(
        prog="grpo-fast",
        description="Group-relative policy optimisation of language models.",
        epilog=FIRST_STEPS,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    parser.add_argument("--debug", action="store_true", help="show a traceback when a command fails")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for add in (
        *(add_train, add_eval, add_generate, add_groups, add_plan),
        *(add_export, add_report, add_convert, add_doctor, add_bench),
    ):
        add(subparsers)
    return parser, dict(subparsers.choices)


class Version(argparse.Action):
    """Prints the version, read from the package's metadata only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"grpo-fast {version('grpo-fast')}")
        parser.exit(OK)


def add_train(subparsers: Any) -> None:
    command = subparsers.add_parser("train", help="train a model", epilog=OVERRIDES_HELP)
    command.set_defaults(handler="train", takes_overrides=True)
    command.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    command.add_argument(
        "--print-config", action="store_true", help="print the whole configuration and leave"
    )
    command.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="continue from the newest intact checkpoint in output_dir, or from this one",
    )
    command.add_argument("--plain", action="store_true", help="plain lines instead of the live display")


def add_eval(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "eval", help="pass@1, pass@k and mean@k on a dataset", epilog=OVERRIDES_HELP
    )
    command.set_defaults(handler="evaluate", takes_overrides=True)
    command.add_argument("config", nargs="?", metavar="CONFIG", help=f"{CONFIG_HELP}; a run: its weights")
    command.add_argument("--model", metavar="PATH", help="the model, instead of the configuration's")
    command.add_argument("--dataset", metavar="SOURCE", help="the questions, instead of the configuration's")
    command.add_argument("--reward", metavar="NAME", help="the reward that decides")
    command.add_argument("--k", type=int, nargs="+", default=[1], help="the k of pass@k")
    command.add_argument("--num-samples", type=int, metavar="N", help="answers a question; the largest k")
    command.add_argument("--output", metavar="FILE", help="write figures, scores and answers as JSON")


def add_generate(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "generate",
        aliases=["preview"],
        help="look at prompts, completions and rewards before training",
        epilog=OVERRIDES_HELP,
    )
    command.set_defaults(handler="generate", takes_overrides=True)
    command.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    command.add_argument("--num-prompts", type=int, default=2, metavar="N", help="prompts to show (2)")


def add_groups(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "groups",
        help="look at how the prompts would be grouped: sizes, likeness, examples",
        epilog=OVERRIDES_HELP,
    )
    command.set_defaults(handler="groups", takes_overrides=True)
    command.add_argument("action", choices=["describe"], help="what to do")
    command.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    command.add_argument("--examples", type=int, default=3, metavar="N", help="groups to show (3)")


def add_plan(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "plan",
        help="what fits: bytes by part, the largest group and micro-batch, and what makes room",
        epilog=OVERRIDES_HELP,
    )
    command.set_defaults(handler="plan", takes_overrides=True)
    command.add_argument("config", nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    command.add_argument(
        "--model", metavar="MODEL", help="a folder, config.json, hub id, or a known shape as Qwen2.5-1.5B"
    )
    command.add_argument(
        "--gpu", metavar="GPU", help="H200, RTX-4090, 141GiB, ... or cpu; default: the device at hand"
    )
    command.add_argument("--prompt-length", type=int, metavar="P", help="tokens of the longest prompt")
    command.add_argument(
        "--calibrate", action="store_true", help="first measure a micro-batch of a few layers on this device"
    )
    command.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")


def add_export(subparsers: Any) -> None:
    command = subparsers.add_parser("export", help="write a trained model for transformers and vLLM")
    command.set_defaults(handler="export")
    command.add_argument(
        "run", metavar="RUN_OR_CHECKPOINT", help="a run's directory, or one checkpoint of it"
    )
    command.add_argument("out", metavar="OUT", help="the folder to write")


def add_report(subparsers: Any) -> None:
    command = subparsers.add_parser("report", help="write a run's HTML report")
    command.set_defaults(handler="report")
    command.add_argument("run", metavar="RUN_DIR")


def add_convert(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "convert", help="turn an Axolotl, TRL or NeMo-RL configuration into ours, listing each key"
    )
    command.set_defaults(handler="convert")
    command.add_argument("file", metavar="FILE", help="YAML or JSON")
    command.add_argument(
        "-o", "--output", metavar="OUT", help="the YAML file to write; default: standard output"
    )
    command.add_argument(
        "--source", choices=("axolotl", "trl", "nemo_rl"), help="default: recognised by its keys"
    )


def add_doctor(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "doctor", help="what is installed, which device, which kernels and engines"
    )
    command.set_defaults(handler="doctor")
    command.add_argument("--json", action="store_true", help="as JSON")


def add_bench(subparsers: Any) -> None:
    subparsers.add_parser("bench", help="speed, memory and accuracy, ours and the peers'", add_help=False)
