"""`python -m benchmarks`, or `grpo-fast bench`: each command explains itself with --help."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

COMMANDS = {
    "head": ("head", "time, memory and accuracy of the LM head, ours and the peers'"),
    "smoke": ("smoke", "whether the head is right on this device, at the sizes it is used at"),
    "profile": ("profile", "the kernels that one step of the head spends its time in"),
    "kernels": ("kernels", "each kernel of ours alone, against what the device can do"),
    "step": ("step", "one policy update of a real architecture, ours and the peers'"),
    "rollout": ("rollout", "an engine's cycle: generate, sleep, sync, wake"),
    "group": ("group", "the largest group whose update fits the memory"),
    "train": ("train", "whole training steps, our trainer and TRL's"),
    "bias": ("bias", "errors of a backward that draws, drops or filters, against tokens and tolerance"),
    "rows": ("live_tiles", "sample a model's own rows, and the histogram of their live tiles"),
    "readme": ("readme", "write README.md's tables from the checked-in records"),
}
FAILURE, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m benchmarks") -> int:
    """Run one command; the exit code is 0 done, 1 something found, 2 wrong usage, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(program, arguments[:1]).parse_args(arguments)
    try:
        return options.handler(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, ImportError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return FAILURE


def _parser(program: str, chosen: Sequence[str]) -> argparse.ArgumentParser:
    """With the options of the chosen command alone: the others are not imported."""
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is saved
    sys.exit(main())
