"""`python -m benchmarks`, or `grpo-fast bench`: each command explains itself with --help."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {  # the module, and what `--help` says
    "head": ("head", "time, memory and accuracy of the LM head, ours and the peers'"),
    "accuracy": ("accuracy", "whether the head is right on this device, at the sizes it is used at"),
    "kernels": ("kernels", "each kernel of ours in one forward and backward of the head"),
    "step": ("step", "one policy update of a real architecture, ours and the peers'"),
    "group": ("group", "the largest group whose update fits the memory"),
    "rollout": ("rollout", "an engine's cycle: generate, sleep, sync, wake"),
    "train": ("train", "whole training steps, our trainer and TRL's"),
    "quickstart": ("quickstart", "held-out score of a recipe before and after, over several seeds"),
    "bias": ("bias", "errors of a sampled and of a dropped gradient, against the tokens"),
    "readme": ("readme", "write the tables of README.md and docs/ from the records"),
}
REMOVED = {  # commands that are gone, and what replaces them
    "smoke": "run accuracy",
    "profile": "run kernels",
    "aot": "run `python tests/kernels/aot.py`",
    "models": "docs/models.md lists the families that were compared",
    "vllm": "docs/models.md lists the families that were compared",
    **dict.fromkeys(["pack", "turns", "scaling", "crossover"], "benchmarks/results/tried.md has its figures"),
    **dict.fromkeys(["rows", "compare", "report"], "read the JSON records, which --json writes"),
}
FAILURE, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m benchmarks") -> int:
    """Run one command; the exit code is 0 done, 1 something found, 2 wrong usage, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(program, arguments[:1])
    if gone := REMOVED.get(next(iter(arguments), "")):
        parser.error(f"{arguments[0]} was removed: {gone}")
    options = parser.parse_args(arguments)
    try:
        return options.handler(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, ImportError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return FAILURE


def _parser(program: str, chosen: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser with the options of the chosen command; the others are not imported."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in chosen:
            found = importlib.import_module(f".{module}", __package__)
            command.description = found.__doc__
            found.add_arguments(command)
            command.set_defaults(handler=found.main, kind=name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
