"""How a model is decoded: what is read once, what is held, and what is left behind."""

from __future__ import annotations

import re
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from grpo_fast.policy import Policy
from grpo_fast.policy.architecture import distance
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.choice import fitting_decoder
from grpo_fast.rollout.decoder import EvenDecoder, ExpandedDecoder, RecomputedDecoder, selected
from grpo_fast.rollout.shared_prefix import HybridDecoder, SharedPrefixDecoder
from grpo_fast.rollout.transformers import OwnCopyEngine, TransformersEngine

LATENT = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"]
PROMPTS = [(4, 9, 3, 12, 7, 7, 20, 5), (8, 8, 25), (6, 11, 17, 14, 10)]
OWNERS = [0, 0, 1, 1, 1, 2]


def decoded(way, model, prompts=PROMPTS, owners=OWNERS, steps: int = 6):
    """Logits (rows, steps, V) of a draw whose last row leaves half-way, its tokens, and the decoder."""
    tokens = torch.randint(3, 29, (len(owners), steps))
    decoder, logits = way(model, steps), torch.zeros(len(owners), steps, 30)
    model.set_attn_implementation(decoder.attention)
    held = torch.arange(len(owners))
    with torch.no_grad():
        logits[:, 0] = decoder.prefill(prompts, torch.tensor(owners))
        for step in range(1, steps):
            if step == steps // 2:
                held = held[:-1]
                decoder.keep(held)
            logits[held, step] = decoder.step(tokens[held, step - 1])
    return logits, tokens, decoder


@torch.no_grad()
def own(model, tokens, prompts=PROMPTS, owners=OWNERS):
    """What `decoded` should give, of whole sequences without a cache."""
    expected = torch.zeros(*tokens.shape, 30)
    for row, owner in enumerate(owners):
        ids = torch.tensor([[*prompts[owner], *tokens[row].tolist()]])
        expected[row] = model(ids, use_cache=False).logits[0, len(prompts[owner]) - 1 : -1]
    expected[-1, tokens.shape[1] // 2 :] = 0
    return expected


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
@pytest.mark.drawn(4)
def test_latent_attention_decodes_to_rounding_from_one_latent_a_token(family, adapted, family_model):
    model = family_model(family)
    assert model.config.v_head_dim != model.config.qk_nope_head_dim + model.config.qk_rope_head_dim
    if adapted:
        lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, lora).eval().get_base_model()

    logits, tokens, decoder = decoded(SharedPrefixDecoder, model)

    assert distance(logits.flatten(0, 1), own(model, tokens).flatten(0, 1)) < 1e-5
    width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    for layer in decoder.layers:
        assert layer.keys.shape == (5, 1, 5, width)
        assert layer.values.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()
        assert layer.prefix[0].shape == (2, 1, 8, width)  # the third prompt has left with its row
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_keys_and_values_of_unequal_widths_decode_to_rounding(family_model):
    model = family_model("youtu")
    logits, tokens, _ = decoded(ExpandedDecoder, model)
    assert distance(logits.flatten(0, 1), own(model, tokens).flatten(0, 1)) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "kimi_linear", "lfm2", "mamba2"])
def test_a_prompt_is_read_once_and_its_state_forked_for_all_its_completions(family, family_model):
    model = family_model(family)
    way, read = (ExpandedDecoder if family == "mamba2" else HybridDecoder), []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, given, __: read.append(given[0].numel()))

    logits, tokens, _ = decoded(way, model)

    assert read == [len(PROMPTS) * max(map(len, PROMPTS)), 6, 6, 5, 5, 5]
    assert distance(logits.flatten(0, 1), own(model, tokens).flatten(0, 1)) < 1e-5


@pytest.mark.parametrize("family", ["minimax", "xlstm", "qwen3_next", "mamba2"])
def test_a_draw_leaves_nothing_in_the_model(family, seed, family_model, tokenizer):
    model = family_model(family)
    ids = torch.randint(3, 29, (3, 9))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    engine = TransformersEngine(model, tokenizer, eos_ids=(1,))
    first = engine.generate(PROMPTS, 3, Sampling(8, seed=seed))

    assert engine.generate(PROMPTS, 3, Sampling(8, seed=seed)) == first
    loss = model(ids, use_cache=False).logits.float().square().mean()
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("family", "way", "reason"),
    [
        (
            "recurrent_gemma",
            RecomputedDecoder,
            "costs its whole sequence again, which is slow: .*no cache back",
        ),
        ("xlstm", EvenDecoder, "only where they are of one length: .*of their norm off"),
    ],
)
def test_a_slower_way_is_taken_with_one_warning_that_says_why(family, way, reason, family_model, caplog):
    assert fitting_decoder(family_model(family)) is way

    (record,) = caplog.records
    assert re.search(reason, record.getMessage())


@pytest.mark.parametrize(("flips", "way"), [({2}, SharedPrefixDecoder), ({1, 2, 3}, ExpandedDecoder)])
def test_a_single_token_that_differs_does_not_condemn_a_way(flips, way, family_model, monkeypatch):
    """As where a router's choice between two experts falls otherwise in 16 bits."""
    model, calls, plain = family_model("llama"), [], SharedPrefixDecoder.step

    def step(decoder, tokens):
        calls.append(tokens)
        return plain(decoder, tokens) * (3.0 if len(calls) in flips else 1.0)

    monkeypatch.setattr(SharedPrefixDecoder, "step", step)

    assert fitting_decoder(model) is way


def test_a_model_that_sees_later_tokens_is_not_sampled(tokenizer):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.5
    )

    with pytest.raises(ValueError, match=r"BertLMHeadModel cannot be sampled: .* of their norm off"):
        TransformersEngine(BertLMHeadModel(config).eval(), tokenizer, eos_ids=(1,)).__enter__()


def test_rows_of_positions_in_planes_are_selected_beside_states():
    positions, states = torch.arange(3 * 4 * 2).view(3, 4, 2), torch.rand(4, 5)

    found = selected({"positions": positions, "layers": [(states,), torch.zeros(1)]}, torch.tensor([0, 3]), 4)

    assert torch.equal(found["positions"], positions[:, [0, 3]])
    assert torch.equal(found["layers"][0][0], states[[0, 3]])


def test_a_cache_that_holds_other_rows_is_not_selected_from():
    with pytest.raises(NotImplementedError, match=r"\(2, 3\) for 4 rows"):
        selected([torch.zeros(2, 3)], torch.tensor([0]), 4)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "minimax"])
def test_a_copy_of_its_own_is_decoded_alike(family, seed, family_model, tokenizer, largest_difference):
    """As in mode shard, where the engine has gathered the weights."""
    policy = Policy(family_model(family), tokenizer)
    engine = OwnCopyEngine(policy)
    engine.sync(policy)
    engine.wake()

    groups = engine.generate(PROMPTS, 2, Sampling(8, seed=seed))

    like = SimpleNamespace(base_model=policy.base_model, device=policy.device)
    assert largest_difference(like, PROMPTS, groups) < 1e-4
    engine.sleep()
    assert engine.freed() > 0
