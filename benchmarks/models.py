"""What a step works on: real architectures with random weights, and sequences of real lengths.

What a step costs depends on shapes, not on what was learned.

But for the head: a random model's rows are flat, so a sparse backward can leave nothing out and takes its
dense path. `python -m benchmarks head --histogram` shows what a trained model's rows change.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Len
from pydantic import PositiveInt, TypeAdapter

from grpo_fast.objective import StepTotals
from grpo_fast.plan import SHAPES
from grpo_fast.policy import Policy, Sample
from grpo_fast.policy.attention import PACKED_ATTENTION, register
from grpo_fast.policy.load import resolve_attention

from .problem import DTYPES
from .session import positive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TokenCounts = Annotated[tuple[PositiveInt, ...], Len(min_length=1)]
LENGTHS = Path(__file__).with_name("lengths_gsm8k.json")


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder with gated MLP and grouped attention."""

    name: str
    family: str  # transformers' model type
    sizes: Mapping[str, Any]  # what its configuration says, under transformers' names

    @property
    def vocabulary(self) -> int:
        return self.sizes["vocab_size"]

    @property
    def hidden(self) -> int:
        return self.sizes["hidden_size"]

    @property
    def layers(self) -> int:
        return self.sizes["num_hidden_layers"]

    @property
    def attention_width(self) -> int:
        """Of all heads together."""
        heads = self.sizes["num_attention_heads"]
        return heads * self.sizes.get("head_dim", self.hidden // heads)

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Of the matrices that every token meets, the head and the embedding left out."""
        shared = self.sizes["num_key_value_heads"] / self.sizes["num_attention_heads"]
        attention = self.hidden * round(self.attention_width * (2 + 2 * shared))
        return self.layers * (attention + 3 * self.hidden * self.sizes["intermediate_size"])

    def update_flops(
        self, lengths: Sequence[tuple[int, int]], *, layers: bool = True, head: bool = True
    ) -> float:
        """Of forward and backward of whole sequences, (prompt, completion) tokens each.

        The head meets completions only. 2 FLOPs a token and parameter forward, 2 for the activations'
        gradient, 2 for the weight's where it is trained; causal attention's two products are 6 A L² a layer
        of attention width A. Recomputation, adapters and prompts shared between sequences are not counted:
        this is what the update is worth, not what it costs.

        Args:
            layers: whether the layers' weights take a gradient.
            head: whether the head's does.
        """
        tokens = sum(prompt + completion for prompt, completion in lengths)
        scored = sum(completion for _, completion in lengths)
        squares = sum((prompt + completion) ** 2 for prompt, completion in lengths)
        products = (4 + 2 * layers) * self.layer_parameters * tokens
        products += (4 + 2 * head) * self.head_parameters * scored
        return products + 6.0 * self.layers * self.attention_width * squares


_TOY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
ARCHITECTURES = {
    name: Architecture(name, family, sizes)
    for name, (family, sizes) in (SHAPES | {"toy": ("llama", _TOY)}).items()
}


def architecture_of(name: str, layers: int | None) -> Architecture:
    """The named one, cut to its first layers where a number is given."""
    found = ARCHITECTURES[name]
    if layers is None or layers >= found.layers:
        return found
    return replace(found, sizes={**found.sizes, "num_hidden_layers": layers})


def add_model_arguments(parser: argparse.ArgumentParser, layers_on_cpu: int) -> None:
    parser.add_argument(
        "--model", nargs="+", choices=ARCHITECTURES, help="those that suit the device, unless given"
    )
    parser.add_argument(
        "--layers", type=positive, help=f"only so many of its layers (on a CPU {layers_on_cpu})"
    )


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """What of a model is trained, and how."""
    parser.add_argument("--lora", type=positive, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the head")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="recompute each layer's activations"
    )


def chosen_models(
    options: argparse.Namespace, usual: Sequence[str], usual_layers: int | None
) -> list[Architecture]:
    """Those asked for, or the usual ones, cut to their first layers where a number is given."""
    layers = options.layers or (None if options.model else usual_layers)
    return [architecture_of(name, layers) for name in options.model or usual]


def training_options(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of `make_policy`; and what they say in a shape."""
    trained = "all but the head" if options.frozen else "all"
    made = {
        "lora_rank": options.lora,
        "freeze_head": options.frozen,
        "gradient_checkpointing": options.gradient_checkpointing,
    }
    return made, {
        "trained": f"LoRA r = {options.lora}" if options.lora else trained,
        "gradient_checkpointing": options.gradient_checkpointing,
    }


def make_policy(
    architecture: Architecture,
    *,
    dtype: str,
    device: torch.device,
    seed: int,
    freeze_head: bool = False,
    lora_rank: int | None = None,
    gradient_checkpointing: bool = False,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Policy:
    """A policy of random weights, set up as `load_policy` sets up a real one.

    Args:
        freeze_head: no gradient for the head; tied, none for the embedding either.
        lora_rank: adapters of this rank on every layer, all else frozen.
        tokenizer: only generation needs one.
    """
    from transformers import AutoModelForCausalLM

    register()
    attention = resolve_attention("auto", device, dtype)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            model_config(architecture, tokenizer),
            dtype=DTYPES[dtype],
            attn_implementation=attention if attention == "flash_attention_2" else PACKED_ATTENTION,
        )
    if lora_rank is not None:
        import peft

        adapters = peft.LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    elif freeze_head:
        model.get_output_embeddings().requires_grad_(False)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model.train(), tokenizer, attention=attention)


def model_config(architecture: Architecture, tokenizer: PreTrainedTokenizerFast | None = None) -> object:
    """transformers' configuration; end and padding as the tokenizer has them."""
    from transformers import AutoConfig

    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    if tokenizer is not None:
        ends |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return AutoConfig.for_model(architecture.family, **{**architecture.sizes, **ends})


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One word a token, w0, w1, …; the last two are padding and the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary - 2)}
    words |= {"<pad>": vocabulary - 2, "<eos>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


@dataclass(frozen=True)
class Lengths:
    """Tokens of a dataset's prompts and of their answers."""

    source: str
    prompts: TokenCounts
    completions: TokenCounts

    def draw(
        self, prompts: int, group: int, seed: int, *, longest: int | None = None
    ) -> list[tuple[int, int]]:
        """(prompt, completion) tokens of each sequence, group after group.

        Args:
            longest: completions are cut off there, as by a maximum length.
        """
        generator = random.Random(seed)
        drawn = []
        for _ in range(prompts):
            prompt = generator.choice(self.prompts)
            for _ in range(group):
                completion = generator.choice(self.completions)
                drawn.append((prompt, completion if longest is None else min(completion, longest)))
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
