"""Tiny random models of several families, and samples to run through them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from grpo_fast.config.policy import ModelConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.policy import load_policy, pack
from tests import tiny

VOCABULARY = 61
SIZES = {
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
}
CHANGES = {  # of the sizes that `tests.tiny` gives a family
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"attn_logit_softcapping": 2.0},  # one sliding layer, one full; both softcaps
    # Heads of two widths, experts beside the MLP, and a layer that takes the keys of the one before.
    "gemma4_text": {
        **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2},
        **{"enable_moe_block": True, "vocab_size_per_layer_input": VOCABULARY},
    },
    "mimo_v2_flash": {"head_dim": 12},  # wider than its values
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "cohere": {"logit_scale": 0.25},
    "seed_oss": {"residual_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.3},
    "phimoe": {"input_jitter_noise": 0.3},
    "falcon_h1": {"lm_head_multiplier": 0.25},
    "hyperclovax": {"logits_scaling": 0.5},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.4, "embedding_multiplier": 2.0},
}


def small_config(family, **changes):
    tiny.require_family(family)
    usual = tiny.changes(AutoConfig.for_model(family))
    return AutoConfig.for_model(family, **{**usual, **SIZES, **CHANGES.get(family, {}), **changes})


def save_model(folder, family="llama", **changes):
    """A random model with a word tokenizer, saved as a user would have it on disk."""
    model = AutoModelForCausalLM.from_config(small_config(family, **changes))
    for name, parameter in model.named_parameters():  # small random weights barely move the logits
        if parameter.ndim >= 2 and "layers" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder


def make_samples(rng, groups=4, generations=3, prompt=9, completion=6):
    """Prompts of 1 to `prompt` tokens, the first the longest; completions of 1 to `completion`; shuffled."""

    def integers(high, count):
        return tuple(torch.randint(0, high, (count,), generator=rng).tolist())

    rows = []
    for group in range(groups):
        prompt_ids = integers(VOCABULARY, 1 + integers(prompt, 1)[0] if group else prompt)
        for _ in range(generations):
            length = 1 + integers(completion, 1)[0]
            rows.append((prompt_ids, integers(VOCABULARY, length), group))
    table = CompletionTable.of(*zip(*rows, strict=True))
    advantages, logprobs = torch.randn(2, len(table.token_ids), generator=rng)
    table = table.with_columns(advantages=advantages, sampler_logprobs=logprobs)
    return table.select(torch.randperm(len(rows), generator=rng))


def packed(table, max_tokens=10**6, **options):
    return pack(table, max_tokens=max_tokens, device="cpu", **options)


def batch_logprobs(policy, batch):
    """(N,) of the batch's targets."""
    logits = policy.head.logits(policy.hidden_states(batch))
    return logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]


def own_logprobs(model, table, rows):
    """(N,) of these completions' tokens, by the model's own forward of each sequence alone."""
    found = []
    for row in rows:
        prompt, tokens = table.prompt_of(int(row)), table.tokens_of(int(row))
        logits = model(input_ids=torch.cat([prompt, tokens])[None], use_cache=False).logits
        logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(logprobs.gather(1, tokens[:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """`folder_of("gemma2")`: a saved random model of that family, made once."""

    @cache
    def folder(family, **changes):
        return save_model(tmp_path_factory.mktemp(family), family, **changes)

    return folder


@pytest.fixture(scope="session")
def load(folder_of):
    """`load("llama", dtype="bfloat16")`: a policy of that family, in float32 unless said otherwise."""

    def load(family="llama", *, needs_reference=False, router_replay=False, **settings):
        settings = {"path": str(folder_of(family)), "dtype": "float32", "device": "cpu", **settings}
        config = ModelConfig.model_validate(settings)
        return load_policy(config, needs_reference=needs_reference, router_replay=router_replay)

    return load


@pytest.fixture
def samples(rng):
    return make_samples(rng)


@pytest.fixture
def batch(samples):
    (batch,) = pack(samples, max_tokens=10_000, device="cpu")
    return batch
