"""What a step works on: real architectures with random weights, and sequences of real lengths.

What a step costs depends on shapes, not on what was learned.

But for the head: a random model's rows are flat, so a sparse backward can leave nothing out and takes its
dense path. `python -m benchmarks head --histogram` shows what a trained model's rows change.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import torch

from grpo_fast.config.policy import ModelConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.objective import StepTotals
from grpo_fast.plan import SHAPES
from grpo_fast.plan.measure import random_policy
from grpo_fast.plan.model_shape import with_layers
from grpo_fast.policy import Policy
from grpo_fast.policy.load import resolve_attention

from .session import ByDevice, positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

LENGTHS = Path(__file__).with_name("lengths_gsm8k.json")
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TOY = _SMALL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
_WORDS = _SMALL | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
ARCHITECTURES = SHAPES | {
    "toy": ("llama", _TOY | {"max_position_embeddings": 32_768}),
    "words": ("llama", _WORDS),  # its weights are large enough for rewards to move them
}


# Models ---------------------------------------------------------------------------------------------------


def add_models(parser: argparse.ArgumentParser, cuda: list[str], cpu: list[str], cpu_layers: int) -> None:
    """Options for the architectures: those of a GPU, and those of a CPU with so many layers."""
    models, layers = ByDevice(cuda, cpu), ByDevice(None, cpu_layers)
    parser.add_argument("--model", nargs="+", choices=ARCHITECTURES, default=models, help="(%(default)s)")
    parser.add_argument(
        "--layers", type=positive, default=layers, help=f"of each, at most (all; on a CPU {cpu_layers})"
    )


def chosen_models(options: argparse.Namespace) -> list[tuple[ModelConfig, dict[str, Any]]]:
    """Each, with all weights trained and no activation recomputed; `model` and `layers` of its shape."""
    kind = {"dtype": options.dtype, "device": options.device, "gradient_checkpointing": False}
    layers = {name: architecture(name, options.layers).num_hidden_layers for name in options.model}
    return [(ModelConfig(path=name, **kind), {"model": name, "layers": n}) for name, n in layers.items()]


def architecture(name: str, layers: int | None = None) -> PretrainedConfig:
    """transformers' configuration; the last two tokens are padding and the end, as of `make_tokenizer`."""
    from transformers import AutoConfig

    family, sizes = ARCHITECTURES[name]
    ends = {"pad_token_id": sizes["vocab_size"] - 2, "eos_token_id": sizes["vocab_size"] - 1}
    found = AutoConfig.for_model(family, **sizes, **ends, bos_token_id=None)
    return found if layers is None else with_layers(found, min(layers, found.num_hidden_layers))


def vocabulary_of(name: str) -> int:
    return ARCHITECTURES[name][1]["vocab_size"]


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One word a token, w0, w1, …; the last two are padding and the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(f"w{i}" for i in range(vocabulary - 2)), "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


def make_letters(vocabulary: int) -> PreTrainedTokenizerFast:
    """One letter a token, a to z; what else a model may draw reads w26, w27, …

    Beside a Qwen2 transformers reads any tokenizer's file as Qwen2's, whose class makes no tokens of words
    and the same ones of letters.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [*ascii_lowercase, *(f"w{i}" for i in range(26, vocabulary - 2)), "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def make_policy(
    model: ModelConfig,
    layers: int | None = None,
    seed: int = 0,
    tokenizer: Callable[[int], PreTrainedTokenizerFast] = make_tokenizer,
) -> Policy:
    """Of random weights, and a tokenizer of as many tokens; else as `load_policy` would make it.

    Args:
        model: its path is one of `ARCHITECTURES`.
    """
    device = torch.device(model.device)
    config = architecture(model.path, layers)
    attention = resolve_attention("auto", device, model.dtype, config)
    torch.manual_seed(seed)
    policy = random_policy(config, model, attention=attention, device=device)
    policy.tokenizer = tokenizer(config.vocab_size)
    return policy


def update_flops(model: PreTrainedModel, lengths: Sequence[tuple[int, int]]) -> float:
    """Of forward and backward of whole sequences, (prompt, completion) tokens each, all weights trained.

    The head meets completions only. 6 FLOPs a token and parameter: 2 forward, and 2 for either gradient;
    causal attention's two products are 6 A L² a layer of attention width A. Recomputation and prompts shared
    between sequences are not counted: this is what the update is worth, not what it costs.
    """
    config = model.config
    tokens = sum(prompt + completion for prompt, completion in lengths)
    scored = sum(completion for _, completion in lengths)
    squares = sum((prompt + completion) ** 2 for prompt, completion in lengths)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * squares
    matrices = sum(
        weight.numel() for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2
    )
    return 6.0 * (attention + matrices * tokens + model.get_output_embeddings().weight.numel() * scored)


# Sequences ------------------------------------------------------------------------------------------------


def draw_lengths(prompts: int, group: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, completion) tokens of GSM8K's questions and answers, of each sequence, group after group."""
    counts, generator = json.loads(LENGTHS.read_text()), random.Random(seed)
    drawn = []
    for _ in range(prompts):
        prompt = generator.choice(counts["prompts"])
        drawn += [(prompt, generator.choice(counts["completions"])) for _ in range(group)]
    return drawn


def make_samples(
    lengths: Sequence[tuple[int, int]], group: int, vocabulary: int, seed: int
) -> tuple[CompletionTable, StepTotals]:
    """Random tokens of the given lengths; a group shares its prompt, and half of it has a positive advantage.

    The two last tokens of the vocabulary, padding and end, are not drawn.
    """
    generator = random.Random(seed)
    rows = []
    prompt: tuple[int, ...] = ()
    for index, (prompt_length, length) in enumerate(lengths):
        if index % group == 0:
            prompt = tuple(generator.choices(range(vocabulary - 2), k=prompt_length))
        rows.append((prompt, tuple(generator.choices(range(vocabulary - 2), k=length)), index // group))
    table = CompletionTable.of(*zip(*rows, strict=True))
    advantages = table.spread(1.0 - 2.0 * (torch.arange(len(rows)) % 2))
    table = table.with_columns(advantages=advantages, sampler_logprobs=torch.zeros_like(advantages))
    return table, StepTotals(num_tokens=len(table.token_ids), num_sequences=len(table))
