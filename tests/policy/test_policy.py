from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.policy import load_policy, pack
from grpo_fast.rollout import Sampling, make_engine
from tests.policy.conftest import batch_logprobs, save_model

LORA = {"r": 4, "alpha": 8.0}


def shake(policy):
    """Move every trainable weight, as training would; LoRA starts as the identity."""
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


@pytest.mark.parametrize("settings", [{"lora": LORA}, {}], ids=["lora", "full"])
def test_the_reference_stays_what_was_loaded(load, batch, settings):
    policy = load("llama", needs_reference=True, **settings)
    before = policy.hidden_states(batch).detach()
    trainable = policy.trainable().keys()
    shake(policy)

    with policy.reference() as reference:
        frozen = reference.hidden_states(batch)
        head = reference.head.weight

    assert torch.equal(frozen, before)
    assert not frozen.requires_grad
    assert head.shape == policy.head.weight.shape
    assert not torch.allclose(policy.hidden_states(batch), before)
    assert policy.trainable().keys() == trainable
    if not settings:
        with pytest.raises(RuntimeError, match="needs_reference=True"), load("llama").reference():
            pass


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *itertools.product(("llama", "qwen2", "gemma2"), ({"lora": LORA}, {})),
        ("qwen2", {"lora": {"r": 3, "target_modules": ["embed_tokens", "v_proj"]}}),
        ("gpt2", {"lora": LORA}),  # whose matrices stand the other way round
    ],
)
def test_an_exported_model_computes_what_the_policy_does(load, tmp_path, family, settings):
    policy = load(family, **settings)
    shake(policy)
    ids = torch.arange(4, 20)[None]
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    with torch.no_grad():
        policy.model(ids)

    policy.save_pretrained(tmp_path)

    after = policy.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, use_safetensors=True)
    policy.model.eval()
    with torch.no_grad():
        # The policy honours Gemma's score softcap, which transformers' own SDPA leaves out.
        exported.set_attn_implementation("eager")
        torch.testing.assert_close(exported(ids).logits, policy.model(ids).logits, rtol=1e-4, atol=1e-4)
    assert exported.generation_config.eos_token_id == [2, 3]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert not list(tmp_path.glob("*.bin"))


def test_weights_have_checkpoint_names_and_the_changing_ones_are_known(load):
    plain, adapted = dict(load("llama").named_weights()), dict(load("llama", lora=LORA).named_weights())
    assert "lm_head.weight" not in plain  # tied
    assert adapted.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(adapted[name], tensor)

    full, frozen, lora = load("qwen2"), load("qwen2", train_lm_head=False), load("qwen2", lora=LORA)
    names = {name for name, _ in full.named_weights()}
    assert full.changing_weights() == names
    assert names - frozen.changing_weights() == {"lm_head.weight"}
    assert lora.changing_weights() == {name for name in names if name.endswith("_proj.weight")}


def test_every_end_token_counts(load):
    policy = load("llama")
    assert policy.eos_token_ids == (2, 3)
    policy.base_model.generation_config.eos_token_id = 9
    assert policy.eos_token_ids == (2, 9)


BORDER, LONGEST = 48, 180
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}


@pytest.mark.parametrize("rope", [LONGROPE, {"rope_type": "dynamic", "factor": 4.0}], ids=["long", "dynamic"])
@pytest.mark.parametrize("longest", [BORDER, LONGEST])
def test_rollout_and_update_have_rotary_positions_of_the_longest_sequence(
    tmp_path, samples, rope, longest, seed
):
    """On both sides of the border; below it they are transformers' own."""
    rope = rope | {"rope_theta": 100.0, "original_max_position_embeddings": BORDER}
    folder = save_model(tmp_path, max_position_embeddings=BORDER, rope_parameters=rope)
    policy = load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu"), needs_reference=True)
    prompts = [tuple(samples.prompt_of(row).tolist()) for row in range(4)]
    prompts.append((7, 8, 9) * (3 if longest == BORDER else 50))
    with make_engine(RolloutConfig(engine="transformers"), policy, max_length=longest) as engine:
        groups = engine.generate(prompts, 2, Sampling(6, seed=seed))

    flat = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    logprobs = [c.logprobs for _, c in flat]
    drawn = CompletionTable.of(
        [p for p, _ in flat], [c.token_ids for _, c in flat], sampler_logprobs=logprobs
    )
    with policy.reference() as reference:
        for some, of in ((drawn, policy), (drawn[:2], policy), (drawn, reference)):
            (batch,) = pack(some, max_tokens=10_000, device="cpu")
            drawn_with = batch.columns["sampler_logprobs"]
            torch.testing.assert_close(batch_logprobs(of, batch), drawn_with, rtol=1e-4, atol=1e-4)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(4, 4 + BORDER)[None]
    with torch.no_grad():
        difference = (own(ids).logits - policy.base_model(ids).logits).abs().max()
    assert (difference < 1e-4) == (longest == BORDER)
