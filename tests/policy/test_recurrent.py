"""Packed documents of every kind of layer, and padded rows, against each sequence alone."""

from __future__ import annotations

import copy
import random
from math import inf

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.config.policy import ModelConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.policy import Policy, layout, load_policy, pack
from grpo_fast.policy.architecture import packing_obstacle
from grpo_fast.policy.attention import PACKED_ATTENTION, register
from grpo_fast.policy.layout import LEAST_FILLED, RowLayout, alike
from grpo_fast.policy.load import resolve_packing
from grpo_fast.policy.recurrent import fork_states, recurrent_mixers
from tests.tiny import since

from .conftest import VOCABULARY, batch_logprobs, make_samples, own_logprobs, save_model, small_config

HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h", "granitemoehybrid"),
    *("falcon_h1", "zamba2", "lfm2", "minimax"),
)
DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gemma4_text", "cohere", "granite", "hyperclovax")
SINKS = ("gpt_oss", "granite_swa", "mimo_v2_flash")  # of attention: with experts, with a window, of wide keys
ROWS = ("bloom", "falcon", "stablelm", "llama4_text", "jamba", "mamba2")


def random_model(family, seed):
    """With every number moved, so that no bias, no decay and no gate is what it begins with."""
    register()
    torch.manual_seed(seed)
    config = small_config(family)
    attention = PACKED_ATTENTION if packing_obstacle(config) is None else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def policy_of(model):
    fork_states(model)
    return Policy(model, None, packs=packing_obstacle(model.config) is None)


def packed(policy, samples):
    (batch,) = pack(samples, max_tokens=10_000, device="cpu", shares_prompts=policy.packs)
    return batch


@pytest.mark.parametrize(
    "family", [*DENSE, *(pytest.param(family, marks=since("5.17")) for family in HYBRIDS), *SINKS, *ROWS]
)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(family, rng, seed, monkeypatch):
    """Short completions share a call of SDPA, or each has its own."""
    monkeypatch.setattr(layout, "PAIRS_A_CALL", random.Random(seed).choice([-(10**6), 10**6]))
    model = random_model(family, seed)
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    policy = policy_of(model)
    assert policy.packs == (family not in ROWS)
    samples = make_samples(rng, groups=5, prompt=30, completion=25)
    batch = packed(policy, samples)
    weights = torch.randn(len(batch.targets), generator=rng)

    found, right = batch_logprobs(policy, batch), own_logprobs(own, samples, batch.rows)

    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    (found * weights).sum().backward()
    (right * weights).sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), own.parameters(), strict=True)]
    apart = sum(float((p - q).square().sum()) for p, q in pairs if p is not None and q is not None)
    norm = sum(float(q.square().sum()) for _, q in pairs if q is not None)
    assert (apart / norm) ** 0.5 < 1e-4
    assert all(p is None or not p.any() for p, q in pairs if q is None)


@since("5.17")
@pytest.mark.parametrize("limit", [[0.0, inf], [0.02, 0.05]])
def test_time_steps_keep_to_the_limits_of_the_configuration(limit, tmp_path):
    folder = save_model(tmp_path, "nemotron_h", time_step_limit=limit)
    settings = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    policy = load_policy(settings, needs_reference=True)
    for model in (policy.base_model, policy._reference.base_model):
        assert {mixer.time_step_limit for mixer in recurrent_mixers(model)} == {tuple(limit)}


@since("5.17")
def test_a_shared_prompt_is_computed_once_and_a_row_s_with_each_completion(rng):
    prompt, *completions = torch.randint(VOCABULARY, (160,), generator=rng).split([40, *[20] * 6])
    samples = CompletionTable.of([prompt.tolist()] * 6, [tokens.tolist() for tokens in completions])
    for family, tokens in (("qwen3_next", 40 + 6 * 19), ("jamba", 6 * (40 + 19))):
        policy = policy_of(random_model(family, seed=1))
        counted = []
        (mixer,) = recurrent_mixers(policy.base_model)
        mixer.out_proj.register_forward_hook(
            lambda _module, _inputs, output, counted=counted: counted.append(output.shape[:-1].numel())
        )

        batch_logprobs(policy, packed(policy, samples))

        assert sum(counted) == tokens


def test_packing_auto_falls_back_to_rows(folder_of, monkeypatch, caplog):
    config = ModelConfig(path=str(folder_of("llama")), dtype="float32", device="cpu")
    plain, rows = load_policy(config), load_policy(config.model_copy(update={"packing": "none"}))
    assert plain.packs and not rows.packs
    original = Policy.hidden_states  # which packing will get wrong, and rows not

    def hidden_states(self, *given):
        return original(self, *given) + 9.0 * self.packs

    monkeypatch.setattr(Policy, "hidden_states", hidden_states)
    assert not load_policy(config, needs_reference=True).packs
    assert "model.packing = none is chosen" in caplog.text
    flash = config.model_copy(update={"packing": "none", "attention": "flash_attention_2"})
    with pytest.raises(ValueError, match=r"'flash_attention_2' is for packed completions"):
        resolve_packing(flash, plain.base_model.config)


def test_runs_become_rows_of_about_equal_lengths(rng):
    lengths = torch.randint(1, 400, (60,), generator=rng).tolist()
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    values = torch.randn(starts[-1], 2, generator=rng)
    for side in ("left", "right"):
        found = RowLayout(starts[:-1], lengths, torch.device("cpu"), pads=side)
        joined = found.join([values[rows.tokens] for rows in found.batches])
        assert torch.equal(joined, values[found.tokens])
        assert torch.equal(found.tokens.sort().values, torch.arange(starts[-1]))
        for rows in found.batches:
            real = torch.ones_like(rows.tokens, dtype=torch.bool) if rows.mask is None else rows.mask
            counts = real.sum(1)
            assert (counts >= LEAST_FILLED * counts.max() - 1).all() or counts.max() - counts.min() <= 16
            edge = real[:, -1] if side == "left" else real[:, 0]
            assert edge.all() and torch.equal(counts, torch.tensor(lengths)[rows.runs])
    assert len(alike(torch.tensor(lengths).numpy())) < 12
    (one,) = RowLayout(starts[:-1], lengths, torch.device("cpu"), pads="right", together=True).batches
    assert one.tokens.shape == (60, max(lengths))
