"""A mixture's routers: the load-balancing loss of packed micro-batches, and routers that stay as they are."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.config.policy import LoraConfig, ModelConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.loop.update import packed_loss
from grpo_fast.objective import StepTotals
from grpo_fast.policy import pack
from grpo_fast.policy.experts import balance_loss
from grpo_fast.policy.load import load_architecture
from tests.policy.conftest import small_config

COEFFICIENT = 0.5


def tables(seed):
    """Completions without a prompt in common, and what transformers takes in their place."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.randint(1, 7, (2,), generator=generator).tolist() for _ in range(4)]
    prompts = [torch.randint(4, 60, (size,), generator=generator).tolist() for size, _ in sizes]
    completions = [torch.randint(4, 60, (size,), generator=generator).tolist() for _, size in sizes]
    table = CompletionTable.of(prompts, completions, [*range(4)])
    longest = max(map(sum, sizes))
    ids, mask = torch.zeros(2, 4, longest, dtype=torch.int64)
    for row, tokens in enumerate(zip(prompts, completions, strict=True)):
        inputs = [*tokens[0], *tokens[1][:-1]]  # the last predicts nothing
        ids[row, : len(inputs)], mask[row, : len(inputs)] = torch.tensor(inputs), 1
    noise = torch.randn(2, len(table.token_ids), generator=generator)
    return table.with_columns(advantages=noise[0], sampler_logprobs=noise[1]), ids, mask


@pytest.mark.parametrize("how", [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": "mlp"}])
@pytest.mark.parametrize("packing", ["auto", "none"])
@pytest.mark.parametrize("family", ["jetmoe", "mixtral", "olmoe", "phimoe", "qwen3_moe"])
@pytest.mark.drawn(8)
def test_the_packed_balance_loss_and_its_gradient_are_transformers(
    load, folder_of, family, packing, how, seed
):
    policy = load(family, packing=packing, router_aux_loss=COEFFICIENT, **how)
    own = AutoModelForCausalLM.from_pretrained(
        folder_of(family), dtype=torch.float32, attn_implementation="eager"
    )
    table, ids, mask = tables(seed)
    routed = []
    (batch,) = pack(table, max_tokens=10_000, device="cpu")

    policy.hidden_states(batch, routed=routed)
    found = balance_loss(policy.base_model, routed)
    found.backward()

    expected = own(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    expected.backward()
    torch.testing.assert_close(found, expected)
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("gate" in name or "router" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(policy.trainable()[name].grad, gradient, rtol=1e-3, atol=1e-5)


def test_micro_batches_add_a_mean_of_their_balances_to_the_loss(load, seed):
    """With their completions' tokens as weights, whatever the batches are."""
    policy, plain = load("qwen3_moe", router_aux_loss=COEFFICIENT), load("qwen3_moe")
    table, _, _ = tables(seed)
    totals = StepTotals(10 * len(table.token_ids), 4, measured_tokens=len(table.token_ids))
    batches = pack(table, max_tokens=int(table.lengths.max() + table.prompt_lengths.max()), device="cpu")
    expected = 0.0
    added = found = torch.zeros(())
    for batch in batches:
        routed = []
        policy.hidden_states(batch, routed=routed)
        expected += float(balance_loss(policy.base_model, routed)) * len(batch.targets) / len(table.token_ids)
        ours, theirs = (packed_loss(one, batch, totals=totals) for one in (policy, plain))
        added = added + ours.loss.detach() - theirs.loss.detach()
        found = found + ours.metrics["router_aux_loss"]
        assert "router_aux_loss" not in theirs.metrics

    assert len(batches) > 1
    assert float(found) == pytest.approx(expected, rel=1e-5)
    assert float(added) == pytest.approx(COEFFICIENT * expected, rel=1e-4)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "gemma4_text", "jetmoe", "mixtral", "qwen3_moe"])
def test_a_router_is_frozen_by_a_word_and_nothing_else_is(load, family):
    trained, frozen = (load(family, train_router=word).trainable().keys() for word in (True, False))

    left_out = trained - frozen
    assert left_out and frozen < trained
    assert all({"gate", "router"} & {*name.split(".")} for name in left_out)
    assert not any({"gate", "router"} & {*name.split(".")} for name in frozen)


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("llama", {"router_aux_loss": 0.1}, r"model\.router_aux_loss = 0\.1: .*'llama' has no experts"),
        ("llama", {"train_router": False}, r"model\.train_router = false: .*'llama' has no experts"),
        ("deepseek_v3", {"router_aux_loss": 1e-3}, r"0\.001: transformers has no load-bal.*'deepseek_v3'"),
        ("doge", {"router_aux_loss": 1e-3}, r"transformers has no load-bal.*'doge'"),
        ("qwen4_exp_text", {"router_aux_loss": 1e-3}, r"transformers has no load-bal.*'qwen4_exp_text'"),
    ],
)
def test_words_for_a_router_are_refused_before_any_weight_is_read(tmp_path, family, settings, problem):
    small_config(family).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # which would not load

    with pytest.raises(ValueError, match=problem):
        load_architecture(ModelConfig(path=str(tmp_path), **settings))


def test_a_frozen_routers_adapter_is_frozen(load):
    policy = load("mixtral", train_router=False, lora=LoraConfig(r=2))  # peft adapts the router by itself
    assert policy.trainable() and not any(".gate." in name for name in policy.trainable())


def test_preferences_have_no_balance_loss():
    model = {"path": "x", "router_aux_loss": 0.1}
    with pytest.raises(ValueError, match=r"(?s)model\.router_aux_loss.*is not read by algorithm = 'dpo'"):
        TrainConfig.model_validate({"algorithm": "dpo", "model": model, "dataset": {"source": "-"}})
