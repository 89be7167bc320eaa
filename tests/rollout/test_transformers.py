from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch

from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.rollout import Sampling, make_engine, shared_prefix
from grpo_fast.rollout import transformers as engine_module
from grpo_fast.rollout.decoder import EvenDecoder, ExpandedDecoder, InFlight, RecomputedDecoder, bounded_steps
from grpo_fast.rollout.shared_prefix import HybridDecoder, SharedPrefixDecoder
from grpo_fast.rollout.transformers import TransformersEngine

SYSTEM = (0, *range(3, 23))  # long enough to be worth prefilling once for all
LATENT = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"]
HYBRID = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h", "falcon_h1"]
HYBRID += ["zamba2", "lfm2", "zaya", "jamba"]
FAMILIES = dict.fromkeys(["llama", "qwen3", "hrm_text", *LATENT], SharedPrefixDecoder)
FAMILIES |= dict.fromkeys(HYBRID, HybridDecoder)
FAMILIES |= dict.fromkeys(["mistral", "gemma2", "gemma3", "diffllama", "mamba", "mamba2"], ExpandedDecoder)
FAMILIES |= dict.fromkeys(["minimax", "xlstm"], EvenDecoder)
FAMILIES |= dict.fromkeys(["rwkv", "recurrent_gemma"], RecomputedDecoder)
SAMPLING = Sampling(max_completion_length=12, seed=7)
GREEDY = replace(SAMPLING, temperature=0.0)


def random_prompts(seed: int, count: int, *, system: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [(*system, *(rng.randrange(3, 29) for _ in range(rng.randint(1, 20)))) for _ in range(count)]


@pytest.fixture
def engine_for(tokenizer):
    return lambda model, **options: TransformersEngine(model, tokenizer, **({"eos_ids": (1,)} | options))


def without(model: torch.nn.Module, tokens: tuple[int, ...]) -> None:
    """Make the model never draw these tokens."""
    bias = torch.zeros(model.config.vocab_size)
    bias[list(tokens)] = -1e4
    model.lm_head.bias = torch.nn.Parameter(bias)


def token_ids(groups) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def as_policy(model) -> SimpleNamespace:
    return SimpleNamespace(base_model=model, device=model.device)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [(), SYSTEM], ids=["distinct", "common-beginning"])
@pytest.mark.drawn(8)
def test_logprobs_equal_those_of_a_full_forward_and_greedy_equals_transformers_generate(
    family, system, seed, engine_for, family_model, largest_difference
):
    model, prompts = family_model(family), random_prompts(seed, 5, system=system)
    engine = engine_for(model)
    assert engine._decoder_type is FAMILIES[family]

    groups = engine.generate(prompts, 4, replace(SAMPLING, temperature=0.6))

    assert largest_difference(as_policy(model), prompts, groups, 0.6) < 1e-4
    for prompt, (completion,) in zip(prompts, engine.generate(prompts, 1, GREEDY), strict=True):
        with bounded_steps(model):
            expected = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=SAMPLING.max_completion_length
            )
        assert completion.token_ids == tuple(expected[0, len(prompt) :].tolist())


@pytest.mark.parametrize("apart", [16, 128], ids=["common-beginning-once", "with-each-prompt"])
@pytest.mark.parametrize("drop_below", [0.0, 1.0])
def test_neither_sharing_prefixes_nor_dropping_finished_rows_changes_what_is_drawn(
    model, seed, engine_for, monkeypatch, apart, drop_below
):
    prompts, warm = random_prompts(seed, 6, system=SYSTEM), replace(SAMPLING, temperature=2.0)
    ends = (1, 4, 5, 6, 7)
    with monkeypatch.context() as patch:
        patch.setattr(SharedPrefixDecoder, "supports", classmethod(lambda way, model: False))
        expanded = engine_for(model, eos_ids=ends).generate(prompts, 4, warm)
    monkeypatch.setattr(shared_prefix, "WORTH_APART", apart)
    monkeypatch.setattr(engine_module, "DROP_BELOW", drop_below)

    shared = engine_for(model, eos_ids=ends).generate(prompts, 4, warm)

    assert token_ids(shared) == token_ids(expanded)


@torch.no_grad()
def test_sampled_tokens_follow_the_models_distribution(model, seed, engine_for):
    prompt, draws = random_prompts(seed, 1)[0], 6000
    without(model, (1,))  # every completion has a second token
    groups = engine_for(model).generate([prompt], draws, Sampling(2, temperature=1.3, seed=seed))

    first = torch.tensor([completion.token_ids[0] for completion in groups[0]])
    common = int(first.mode().values)
    head = (model(torch.tensor([[*prompt, common]])).logits[0, -2:] / 1.3).softmax(-1)
    assert_follows(first, head[0])
    second = torch.tensor([c.token_ids[1] for c in groups[0] if c.token_ids[0] == common])
    assert_follows(second, head[1])


def assert_follows(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square over the tokens expected at least 5 times, the rest pooled; false alarm 1e-6 or less."""
    counts, expected = torch.bincount(tokens, minlength=len(probs)).double(), probs.double() * len(tokens)
    often = expected >= 5
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None].clamp(min=1e-9)])
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1]
    degrees = max(1, len(expected) - 1)
    statistic = ((counts - expected) ** 2 / expected).sum()
    p_value = 1 - torch.special.gammainc(torch.tensor(degrees / 2.0), (statistic / 2).float())
    assert p_value > 1e-6, f"chi-square {statistic:.1f} with {degrees} degrees of freedom"


def test_an_end_token_at_the_last_position_is_not_a_truncation(model, seed, engine_for):
    without(model, tuple(i for i in range(30) if i != 1))

    (completion,) = engine_for(model).generate(random_prompts(seed, 1), 1, Sampling(1))[0]

    assert (completion.token_ids, completion.truncated, completion.text) == ((1,), False, "")


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_token_budget_splits_the_work_and_neither_it_nor_company_changes_what_is_drawn(
    family, seed, engine_for, family_model, monkeypatch
):
    monkeypatch.setattr("grpo_fast.rollout.types.REPORT_SECONDS", 0.0)
    model, prompts = family_model(family), random_prompts(seed, 6)
    whole = engine_for(model).generate(prompts, 3, SAMPLING)
    engine, sizes = engine_for(model, max_batch_tokens=70), []
    draw_together, kv_tokens = engine._draw_together, engine._decoder_type.kv_tokens

    def spied(rows, *rest) -> None:
        longest, distinct = max(len(row.prompt) for row in rows), len({row.prompt for row in rows})
        sizes.append(kv_tokens(InFlight(distinct, longest, len(rows), SAMPLING.max_completion_length)))
        draw_together(rows, *rest)

    done: set[int] = set()
    observer = SimpleNamespace(group_done=lambda *_: done.add(len(sizes)), progress=lambda *_: None)
    monkeypatch.setattr(engine, "_draw_together", spied)

    assert token_ids(engine.generate(prompts, 3, SAMPLING, observer=observer)) == token_ids(whole)

    assert len(sizes) > 1 and max(sizes) <= 70
    assert len(done) > 1  # a prompt's completions never wait for those of another batch
    alone = [engine_for(model).generate([prompt], 1, GREEDY)[0] for prompt in prompts]
    assert token_ids(alone) == token_ids(engine_for(model).generate(prompts, 1, GREEDY))


def test_a_budget_below_one_completion_and_missing_end_tokens_are_refused(model, tokenizer, engine_for):
    parts = {"model": model, "tokenizer": tokenizer, "eos_token_ids": (1, 2), "device": model.device}
    with make_engine(RolloutConfig(max_batch_tokens=14), SimpleNamespace(**parts, sharded=False)) as engine:
        assert (engine.model, engine.eos_ids) == (model, (1, 2))
        with pytest.raises(ValueError, match=r"max_batch_tokens = 14.*at least 15"):
            engine.generate([(3,), (3, 4, 5)], 1, SAMPLING)
    with pytest.raises(ValueError, match="eos_ids"):
        engine_for(model, eos_ids=())


def test_training_mode_and_attention_come_back_and_checkpointing_does_not_hinder(model, seed, engine_for):
    prompts, engine = random_prompts(seed, 3), engine_for(model)
    expected = engine.generate(prompts, 2, SAMPLING)
    model.train()
    model.model.layers[0].mlp.eval()
    model.gradient_checkpointing_enable()
    modes = {name: module.training for name, module in model.named_modules()}

    assert engine.generate(prompts, 2, SAMPLING) == expected

    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.config._attn_implementation == "sdpa"
    ids = torch.tensor([[3, 4, 5]])
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_that_swallows_attention_arguments_has_its_prompts_copied(
    model, engine_for, seed, monkeypatch, caplog, largest_difference
):
    layer, prompts = type(model.model.layers[0]), random_prompts(seed, 3)
    forward = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda self, x, shared_prefix=None, **rest: forward(self, x, **rest)
    )

    groups = engine_for(model).generate(prompts, 2, SAMPLING)

    assert largest_difference(as_policy(model), prompts, groups) < 1e-4
    assert "a copy of its prompt's keys and values: LlamaForCausalLM called" in caplog.text


def test_a_failure_in_the_middle_leaves_the_model_as_it_was(model, engine_for, monkeypatch):
    without(model, (1,))  # a second token is decoded
    model.train()
    engine = engine_for(model)
    assert engine._decoder_type is SharedPrefixDecoder
    monkeypatch.setattr(SharedPrefixDecoder, "attend", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        engine.generate([(3, 4)], 2, SAMPLING)

    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_lora_adapters_take_part_at_once(model, seed, engine_for, largest_difference):
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    prompts = random_prompts(seed, 3)

    groups = engine_for(adapted).generate(prompts, 2, SAMPLING)

    assert largest_difference(as_policy(adapted.eval()), prompts, groups) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bf16_on_a_gpu_matches_its_full_forward(family, seed, engine_for, family_model, largest_difference):
    model = family_model(family).to("cuda", torch.bfloat16)
    prompts = random_prompts(seed, 5, system=SYSTEM)

    groups = engine_for(model).generate(prompts, 4, SAMPLING)

    assert largest_difference(as_policy(model), prompts, groups) < 0.3
