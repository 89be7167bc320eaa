"""Architectures with random weights, and sequences of real lengths."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer

from benchmarks.models import (
    ARCHITECTURES,
    add_models,
    architecture,
    chosen_models,
    draw_lengths,
    make_letters,
    make_policy,
    make_samples,
    make_tokenizer,
    update_flops,
    vocabulary_of,
)
from benchmarks.session import add_common_arguments, check_common
from grpo_fast.config.policy import ModelConfig
from grpo_fast.policy import pack

WIDTH, LAYERS = 32, 2  # of attention in the architecture `words`


def test_an_updates_flops_are_those_of_its_products_and_of_half_of_the_attention():
    policy = make_policy(ModelConfig(path="words", dtype="float32", device="cpu"))
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
    ("arguments", "models"),
    [
        ("", {"SmolLM2-135M": 3}),
        ("--model toy SmolLM2-135M", {"toy": 2, "SmolLM2-135M": 3}),
        ("--model Qwen2.5-0.5B --layers 4", {"Qwen2.5-0.5B": 4}),
    ],
)
def test_models_suit_the_device_unless_given(arguments, models):
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, minutes=1)
    add_models(parser, ["Qwen2.5-0.5B", "toy"], ["SmolLM2-135M"], cpu_layers=3)
    options = parser.parse_args(["--device", "cpu", *arguments.split()])
    check_common(options)

    assert {model.path: shape["layers"] for model, shape in chosen_models(options)} == models
    assert architecture("Qwen2.5-0.5B").num_hidden_layers == 24


def test_lengths_are_drawn_by_group_and_repeat_with_the_seed():
    drawn = draw_lengths(3, 4, seed=1)

    assert drawn == draw_lengths(3, 4, seed=1) != draw_lengths(3, 4, seed=2)
    assert [len({prompt for prompt, _ in drawn[i : i + 4]}) for i in (0, 4, 8)] == [1, 1, 1]


def test_samples_share_the_prompt_of_their_group_and_their_counts_are_the_steps():
    lengths = [(2, 300), (2, 5), (4, 1), (4, 2)]

    samples, totals = make_samples(lengths, 2, vocabulary=50, seed=0)

    assert samples.prompts.tolist() == samples.groups.tolist() == [0, 0, 1, 1]
    assert [*zip(samples.prompt_lengths.tolist(), samples.lengths.tolist(), strict=True)] == lengths
    assert samples.columns["advantages"][samples.offsets[:-1]].tolist() == [1, -1, 1, -1]
    assert (totals.num_tokens, totals.num_sequences) == (308, 4)
    tokens = {*samples.prompt_ids.tolist(), *samples.token_ids.tolist()}
    assert tokens <= {*range(48)} and len(tokens) > 40  # neither padding nor the end


def test_the_tokenizer_has_a_word_a_token_and_the_architectures_end():
    tokenizer, toy = make_tokenizer(vocabulary_of("toy")), architecture("toy")

    assert tokenizer("w3 w17")["input_ids"] == [3, 17]
    assert len(tokenizer) == toy.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (toy.pad_token_id, toy.eos_token_id)
    assert architecture("SmolLM2-135M", 2).num_hidden_layers == 2


def test_letters_are_read_alike_beside_any_architecture(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "qwen", ("qwen2", ARCHITECTURES["toy"][1]))
    for name in ("toy", "qwen"):  # a Llama and a Qwen2
        settings = ModelConfig(path=name, dtype="float32", device="cpu")
        make_policy(settings, 1, tokenizer=make_letters).save_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)

        assert tokenizer("hello").input_ids == [7, 4, 11, 11, 14]
        assert tokenizer.decode([0, 26, 300]) == "aw26w300"
        assert len(tokenizer) == architecture(name).vocab_size
        assert tokenizer.eos_token_id == architecture(name).eos_token_id
