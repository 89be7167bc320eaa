"""`python -m benchmarks step`: one policy update of a real architecture, phase by phase.

Random weights, sequences of real lengths. Tokens per second and the share of the ceiling (model FLOP
utilisation, against a product measured in the same run) count every sequence with its own prompt and without
padding, for all implementations alike: sharing prompts shows as speed, padding as the lack of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import ceilings, update
from .architectures import ARCHITECTURES, architecture_of
from .contest import Contest
from .session import add_common_arguments, check_common, choose_names, positive, run_session
from .workload import LENGTHS, load_lengths, make_samples

KIND = "step"
_MODELS = {"cuda": ("Qwen2.5-1.5B", "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B"), "cpu": ("SmolLM2-135M",)}
_SIZES = {"cuda": (16, 16, 16_384, None), "cpu": (1, 4, 512, 2)}  # prompts, group, micro-batch, layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=9)
    parser.add_argument(
        "--model", nargs="+", choices=ARCHITECTURES, help="those that suit the device, unless given"
    )
    parser.add_argument("--layers", type=positive, help="only so many of its layers (on a CPU 2)")
    parser.add_argument("--prompts", type=positive, help="of the update (16; on a CPU 1)")
    parser.add_argument("--group", type=positive, help="completions a prompt (16; on a CPU 4)")
    parser.add_argument(
        "--micro-batch-tokens", type=positive, help="of a forward and backward (16384; CPU 512)"
    )
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", help="token counts, JSON; GSM8K's unless given"
    )
    parser.add_argument("--lora", type=positive, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the head")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="recompute each layer's activations"
    )


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    names = choose_names(update.IMPLEMENTATIONS, options.impl)
    lengths = load_lengths(options.lengths or LENGTHS)
    prompts, group, micro_batch_tokens, layers = _SIZES[device.type]
    prompts, group = options.prompts or prompts, options.group or group
    micro_batch_tokens = options.micro_batch_tokens or micro_batch_tokens
    drawn = lengths.draw(prompts, group, options.seed)
    bouts = []
    for model in options.model or _MODELS[device.type]:
        architecture = architecture_of(model, options.layers or (None if options.model else layers))
        samples, totals = make_samples(drawn, group, architecture.vocabulary, options.seed)
        shape = {
            "model": model,
            "layers": architecture.layers,
            "prompts": prompts,
            "group": group,
            "tokens": sum(map(sum, drawn)),
            "micro_batch_tokens": micro_batch_tokens,
            "lengths": (options.lengths or LENGTHS).stem,
            "trained": f"LoRA r = {options.lora}"
            if options.lora
            else "all but the head"
            if options.frozen
            else "all",
            "gradient_checkpointing": options.gradient_checkpointing,
            "dtype": options.dtype,
        }
        work = update.Update(
            architecture,
            samples,
            totals,
            micro_batch_tokens,
            options.dtype,
            device,
            options.seed,
            {
                "lora_rank": options.lora,
                "freeze_head": options.frozen,
                "gradient_checkpointing": options.gradient_checkpointing,
            },
        )
        entrants = [update.entrant(name, work) for name in names]
        bouts.append(Contest(shape, [ceilings.square_product(options.dtype, device), *entrants], device))
    return run_session(KIND, options, device, bouts)
