"""Architectures with random weights, and sequences of real lengths."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import (
    Defaults,
    architecture,
    load_lengths,
    make_policy,
    make_samples,
    make_tokenizer,
    update_flops,
    vocabulary_of,
)
from grpo_fast.policy import pack
from grpo_fast.policy.config import ModelConfig

WIDTH, LAYERS = 32, 2  # of attention in the architecture `words`


@pytest.mark.parametrize("train_lm_head", [True, False])
def test_an_updates_flops_are_those_of_its_products_and_of_half_of_the_attention(train_lm_head):
    section = ModelConfig(path="words", dtype="float32", device="cpu", train_lm_head=train_lm_head)
    policy = make_policy(section)
    lengths = [(3, 5), (3, 9)]
    samples, _ = make_samples(lengths, 1, vocabulary_of("words"), seed=0)
    (batch,) = pack(samples, max_tokens=100, device="cpu")

    with FlopCounterMode(display=False) as counter:
        loss = (policy.hidden_states(batch) @ policy.head.weight.T).sum()
        loss.backward()

    counts = counter.get_flop_counts()["Global"]
    products = sum(counts[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm) if op in counts)
    inputs = [(prompt - 1, completion) for prompt, completion in lengths]  # the last token is no input
    attention = 3 * 2 * LAYERS * WIDTH * (7**2 + 11**2)  # two products of 2 A L², half of each being causal
    assert update_flops(policy.base_model, inputs) == products + attention


@pytest.mark.parametrize(
    ("arguments", "device", "models", "sizes"),
    [
        ("", "cuda", {"Qwen2.5-0.5B": 24, "toy": 2}, {"prompts": 16}),
        ("", "cpu", {"SmolLM2-135M": 3}, {"prompts": 2}),
        ("--model toy SmolLM2-135M --prompts 5", "cpu", {"toy": 2, "SmolLM2-135M": 30}, {"prompts": 5}),
        ("--layers 4", "cuda", {"Qwen2.5-0.5B": 4, "toy": 2}, {"prompts": 16}),
    ],
)
def test_models_and_sizes_suit_the_device_unless_given(arguments, device, models, sizes):
    defaults = Defaults(("Qwen2.5-0.5B", "toy"), "SmolLM2-135M", 3, {"prompts": (16, 2, "of a step")})
    parser = argparse.ArgumentParser()
    defaults.add_arguments(parser)
    options = parser.parse_args(arguments.split())

    found = defaults.chosen_models(options, torch.device(device))

    assert {model["model"]: model["layers"] for model in found} == models
    assert defaults.chosen_sizes(options, torch.device(device)) == sizes


def test_lengths_are_drawn_by_group_and_repeat_with_the_seed():
    lengths = load_lengths()

    drawn = lengths.draw(3, 4, seed=1)

    assert drawn == lengths.draw(3, 4, seed=1) != lengths.draw(3, 4, seed=2)
    assert [len({prompt for prompt, _ in drawn[i : i + 4]}) for i in (0, 4, 8)] == [1, 1, 1]
    assert "GSM8K" in lengths.source


@pytest.mark.parametrize("text", ["", "{}", '{"source": "x", "prompts": [0], "completions": [1]}'])
def test_lengths_that_cannot_be_used_are_refused_by_name(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"mine\.json cannot be used"):
        load_lengths(path)


def test_samples_share_the_prompt_of_their_group_and_their_counts_are_the_steps():
    lengths = [(2, 3), (2, 5), (4, 1), (4, 2)]

    samples, totals = make_samples(lengths, 2, vocabulary=50, seed=0)

    assert samples[0].prompt_ids == samples[1].prompt_ids != samples[2].prompt_ids
    assert [(len(s.prompt_ids), len(s.completion_ids)) for s in samples] == lengths
    assert [s.group_id for s in samples] == [0, 0, 1, 1]
    assert (totals.num_tokens, totals.num_sequences) == (11, 4)
    assert max(token for s in samples for token in (*s.prompt_ids, *s.completion_ids)) < 48


def test_the_tokenizer_has_a_word_a_token_and_the_architectures_end():
    tokenizer, toy = make_tokenizer(vocabulary_of("toy")), architecture("toy")

    assert tokenizer("w3 w17")["input_ids"] == [3, 17]
    assert len(tokenizer) == toy.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (toy.pad_token_id, toy.eos_token_id)
    assert architecture("SmolLM2-135M", 2).num_hidden_layers == 2
