"""Real architectures with random weights, and sequences of real lengths.

The logits of a random model are flat, so that a sparse backward takes its dense path.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

import torch

from grpo_fast.config.policy import ModelConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.objective import StepTotals
from grpo_fast.plan import SHAPES
from grpo_fast.plan.measure import random_policy
from grpo_fast.policy import Policy
from grpo_fast.policy.load import resolve_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

LENGTHS = Path(__file__).with_name("lengths_gsm8k.json")
_TOY = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
_TOY |= {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
ARCHITECTURES = SHAPES | {"toy": ("llama", _TOY | {"max_position_embeddings": 32_768})}


def config_of(model: str, dtype: str, device: torch.device) -> ModelConfig:
    """Return a configuration with all weights trained and no activation recomputed."""
    return ModelConfig(path=model, dtype=dtype, device=device.type, gradient_checkpointing=False)


def architecture(name: str, layers: int | None = None) -> PretrainedConfig:
    """Return transformers' configuration; the last two tokens are padding and the end."""
    from transformers import AutoConfig

    family, sizes = ARCHITECTURES[name]
    ends = {"pad_token_id": sizes["vocab_size"] - 2, "eos_token_id": sizes["vocab_size"] - 1}
    fewer = {"num_hidden_layers": min(layers, sizes["num_hidden_layers"])} if layers else {}
    return AutoConfig.for_model(family, **sizes | fewer, **ends, bos_token_id=None)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each letter, a to z; the other tokens are w26, w27, and so on.

    transformers loads the tokenizer file of any Qwen2 as Qwen2's, which splits words but not letters.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [*ascii_lowercase, *(f"w{i}" for i in range(26, vocabulary - 2)), "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def make_policy(model: ModelConfig, layers: int | None = None, seed: int = 0) -> Policy:
    """Make a policy with random weights; `model.path` is one of `ARCHITECTURES`."""
    device = torch.device(model.device)
    config = architecture(model.path, layers)
    attention = resolve_attention("auto", device, model.dtype, config)
    torch.manual_seed(seed)
    policy = random_policy(config, model, attention=attention, device=device)
    policy.tokenizer = make_tokenizer(config.vocab_size)
    return policy


def draw_lengths(prompts: int, group: int, seed: int) -> list[tuple[int, int]]:
    """Sample (prompt, completion) tokens of GSM8K's questions and answers, group after group."""
    counts, generator = json.loads(LENGTHS.read_text()), random.Random(seed)
    drawn = []
    for _ in range(prompts):
        prompt = generator.choice(counts["prompts"])
        drawn += [(prompt, generator.choice(counts["completions"])) for _ in range(group)]
    return drawn


def make_samples(
    lengths: Sequence[tuple[int, int]], group: int, vocabulary: int, seed: int
) -> tuple[CompletionTable, StepTotals]:
    """Sample random tokens of the given lengths, without the last two of the vocabulary, padding and end.

    A group shares its prompt, and half of it has advantage 1.
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
