"""What a step works on: real architectures with random weights, and sequences of real lengths.

What a step costs depends on shapes, not on what was learned.

But for the head: a random model's rows are flat, so a sparse backward can leave nothing out and takes its
dense path. `python -m benchmarks head --histogram` shows what a trained model's rows change.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Len
from pydantic import PositiveInt, TypeAdapter
from torch import nn

from grpo_fast.objective import StepTotals
from grpo_fast.plan import SHAPES
from grpo_fast.plan.measure import random_policy
from grpo_fast.plan.model_shape import with_layers
from grpo_fast.policy import Policy, Sample
from grpo_fast.policy.config import LoraConfig, ModelConfig
from grpo_fast.policy.load import resolve_attention

from .session import positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

TokenCounts = Annotated[tuple[PositiveInt, ...], Len(min_length=1)]
LENGTHS = Path(__file__).with_name("lengths_gsm8k.json")
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TOY = _SMALL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
_WORDS = _SMALL | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
_SORT = _SMALL | {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
                  "tie_word_embeddings": True}  # fmt: skip
ARCHITECTURES = SHAPES | {
    "toy": ("llama", _TOY | {"max_position_embeddings": 32_768}),
    "sort": ("qwen2", _SORT),
    "words": ("llama", _WORDS),  # its weights are large enough for rewards to move them
}


# Command line ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defaults:
    """What a subcommand measures where no model and no size is asked for, on a GPU and on a CPU."""

    gpu_models: tuple[str, ...]
    cpu_model: str
    cpu_layers: int | None
    sizes: Mapping[str, tuple[int, int, str]]  # of an option: on a GPU, on a CPU, what it counts

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        cut = "" if self.cpu_layers is None else f" (on a CPU {self.cpu_layers})"
        parser.add_argument(
            "--model", nargs="+", choices=ARCHITECTURES, help="those that suit the device, unless given"
        )
        parser.add_argument("--layers", type=positive, help=f"only so many of its layers{cut}")
        for name, (gpu, cpu, what) in self.sizes.items():
            option = "--" + name.replace("_", "-")
            parser.add_argument(option, type=positive, help=f"{what} ({gpu}; on a CPU {cpu})")

    def chosen_models(self, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
        """`model` and `layers` of each, as a shape has them."""
        on_gpu = device.type == "cuda"
        layers = options.layers or (None if on_gpu or options.model else self.cpu_layers)
        names = options.model or (self.gpu_models if on_gpu else (self.cpu_model,))
        return [{"model": name, "layers": architecture(name, layers).num_hidden_layers} for name in names]

    def chosen_sizes(self, options: argparse.Namespace, device: torch.device) -> dict[str, int]:
        return {
            name: getattr(options, name) or (gpu if device.type == "cuda" else cpu)
            for name, (gpu, cpu, _) in self.sizes.items()
        }


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """What of a model is trained, and how."""
    parser.add_argument("--lora", type=positive, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the head")
    parser.add_argument(
        "--gradient-checkpointing",
        nargs="?",
        const=True,
        default=False,
        choices=["mlp"],
        help="recompute each layer's activations, or those of its MLP alone",
    )


def model_section(options: argparse.Namespace, name: str, device: torch.device) -> ModelConfig:
    """The named architecture, trained as the options say."""
    return ModelConfig(
        path=name,
        dtype=options.dtype,
        device=device.type,
        lora=LoraConfig(r=options.lora) if options.lora else None,
        train_lm_head=not options.frozen,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def training_shape(options: argparse.Namespace) -> dict[str, Any]:
    """What of the training a shape says."""
    trained = "all but the head" if options.frozen else "all"
    return {
        "trained": f"LoRA r = {options.lora}" if options.lora else trained,
        "gradient_checkpointing": options.gradient_checkpointing,
        "dtype": options.dtype,
    }


# Models ---------------------------------------------------------------------------------------------------


def architecture(name: str, layers: int | None = None) -> PretrainedConfig:
    """transformers' configuration; the last two tokens are padding and the end, as of `make_tokenizer`."""
    from transformers import AutoConfig

    family, sizes = ARCHITECTURES[name]
    ends = {"pad_token_id": sizes["vocab_size"] - 2, "eos_token_id": sizes["vocab_size"] - 1}
    found = AutoConfig.for_model(family, **sizes, **ends, bos_token_id=None)
    return found if layers is None else with_layers(found, min(layers, found.num_hidden_layers))


def vocabulary_of(name: str) -> int:
    return ARCHITECTURES[name][1]["vocab_size"]


def make_policy(model: ModelConfig, layers: int | None = None, seed: int = 0) -> Policy:
    """Of random weights and without a tokenizer; else as `load_policy` would make it.

    Args:
        model: its path is one of `ARCHITECTURES`.
    """
    device = torch.device(model.device)
    config = architecture(model.path, layers)
    attention = resolve_attention("auto", device, model.dtype, config)
    torch.manual_seed(seed)
    return random_policy(config, model, attention=attention, device=device)


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


def save_model(
    folder: Path, name: str = "words", layers: int | None = None, dtype: str = "float32", seed: int = 0
) -> None:
    """Random weights and their tokenizer, as `from_pretrained` takes them."""
    policy = make_policy(ModelConfig(path=name, dtype=dtype, device="cpu"), layers, seed)
    policy.tokenizer = make_tokenizer(vocabulary_of(name))
    policy.save_pretrained(folder)


def update_flops(model: PreTrainedModel, lengths: Sequence[tuple[int, int]]) -> float:
    """Of forward and backward of whole sequences, (prompt, completion) tokens each.

    The head meets completions only. 2 FLOPs a token and parameter forward, 2 for the activations' gradient, 2
    for the weight's where it is trained; causal attention's two products are 6 A L² a layer of attention
    width A. Recomputation, adapters and prompts shared between sequences are not counted: this is what the
    update is worth, not what it costs.
    """
    tokens = sum(prompt + completion for prompt, completion in lengths)
    scored = sum(completion for _, completion in lengths)
    squares = sum((prompt + completion) ** 2 for prompt, completion in lengths)
    config = model.config
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    flops = 6.0 * config.num_hidden_layers * width * squares

    def products(weight: nn.Parameter, rows: int) -> float:
        return (4 + 2 * weight.requires_grad) * weight.numel() * rows

    for name, weight in model.named_parameters():
        if ".layers." in name and weight.ndim == 2 and "lora_" not in name:
            flops += products(weight, tokens)
    return flops + products(model.get_output_embeddings().weight, scored)


# Sequences ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Tokens of a dataset's prompts and of their answers."""

    source: str
    prompts: TokenCounts
    completions: TokenCounts

    def draw(self, prompts: int, group: int, seed: int) -> list[tuple[int, int]]:
        """(prompt, completion) tokens of each sequence, group after group."""
        generator = random.Random(seed)
        drawn = []
        for _ in range(prompts):
            prompt = generator.choice(self.prompts)
            drawn += [(prompt, generator.choice(self.completions)) for _ in range(group)]
        return drawn


def load_lengths(path: Path = LENGTHS) -> Lengths:
    """
    Raises:
        ValueError: not JSON with `source`, `prompts` and `completions`, positive numbers of tokens.
    """
    try:
        return TypeAdapter(Lengths).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--lengths {path} cannot be used ({error}); it takes JSON with source, prompts and completions"
        ) from error


def make_samples(
    lengths: Sequence[tuple[int, int]], group: int, vocabulary: int, seed: int
) -> tuple[list[Sample], StepTotals]:
    """Random tokens of the given lengths; a group shares its prompt, and half of it has a positive advantage.

    The two last tokens of the vocabulary, padding and end, are not drawn.
    """
    generator = random.Random(seed)
    samples: list[Sample] = []
    prompt: tuple[int, ...] = ()
    for index, (prompt_length, length) in enumerate(lengths):
        if index % group == 0:
            prompt = tuple(generator.choices(range(vocabulary - 2), k=prompt_length))
        samples.append(
            Sample(
                prompt_ids=prompt,
                completion_ids=tuple(generator.choices(range(vocabulary - 2), k=length)),
                advantage=1.0 if index % 2 == 0 else -1.0,
                group_id=index // group,
                sampler_logprobs=(0.0,) * length,
            )
        )
    return samples, StepTotals(num_tokens=sum(c for _, c in lengths), num_sequences=len(samples))
