"""Architectures with random weights, and sequences of real lengths."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import (
    ARCHITECTURES,
    Architecture,
    load_lengths,
    make_samples,
    make_tokenizer,
    model_config,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_parameters_are_counted_as_the_model_has_them(architecture: Architecture):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(architecture))
    of_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)

    assert architecture.layer_parameters == of_layers
    assert architecture.head_parameters == model.get_output_embeddings().weight.numel()


def test_an_updates_flops_are_three_times_a_forwards():
    toy = ARCHITECTURES["toy"]
    lengths = [(3, 5), (3, 9)]
    tokens, scored, squares = 20, 14, 8**2 + 12**2
    forward = 2 * toy.layer_parameters * tokens + 2 * toy.head_parameters * scored
    attention = 2 * toy.layers * toy.attention_width * squares  # half of two products of 2 A L², being causal

    assert toy.update_flops(lengths) == 3 * (forward + attention)
    frozen = toy.update_flops(lengths, layers=False, head=False)
    assert frozen == 2 * forward + 3 * attention


def test_lengths_are_drawn_by_group_and_repeat_with_the_seed():
    lengths = load_lengths()

    drawn = lengths.draw(3, 4, seed=1, longest=100)

    assert drawn == lengths.draw(3, 4, seed=1, longest=100)
    assert [len({prompt for prompt, _ in drawn[i : i + 4]}) for i in (0, 4, 8)] == [1, 1, 1]
    assert max(completion for _, completion in drawn) <= 100
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


def test_the_tokenizer_has_a_word_a_token_and_an_end():
    tokenizer = make_tokenizer(20)

    assert tokenizer("w3 w17")["input_ids"] == [3, 17]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (18, 19)
    assert len(tokenizer) == 20
