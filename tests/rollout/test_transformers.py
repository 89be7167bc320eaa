"""The engine on the trainer's own model: it samples the model's distribution, in either decoding loop."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GenerationConfig

from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.policy import Policy
from grpo_fast.rollout import Sampling, decoder, make_engine
from grpo_fast.rollout.transformers import OwnCopyEngine, TransformersEngine
from tests.tiny import since

SYSTEM = (0, *range(3, 23))
PLAIN = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "diffllama", "deepseek_v3", "minicpm3", "hrm_text"]
OTHER = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bamba", "falcon_h1"]
OTHER += ["lfm2", "zaya", "jamba", "mamba", "mamba2", "minimax", "xlstm", "deepseek_v4", "bloom"]
SAMPLING = Sampling(max_completion_length=12, seed=7)
GREEDY = replace(SAMPLING, temperature=0.0)


def random_prompts(seed: int, count: int, *, system: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [(*system, *(rng.randrange(3, 29) for _ in range(rng.randint(1, 20)))) for _ in range(count)]


@pytest.fixture
def engine_for(tokenizer):
    def engine_for(model, *, loop: str | None = None, **options) -> TransformersEngine:
        engine = TransformersEngine(model, tokenizer, **({"eos_ids": (1,)} | options))
        if loop is not None:
            engine._reads_prompts_once = loop == "decode"
        return engine

    return engine_for


def without(model: torch.nn.Module, tokens: tuple[int, ...]) -> None:
    """Make the model never sample these tokens."""
    bias = torch.zeros(model.config.vocab_size)
    bias[list(tokens)] = -1e4
    model.lm_head.bias = torch.nn.Parameter(bias)


def read_by(model) -> list[int]:
    """How many tokens each forward reads from now on."""
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, given, __: read.append(given[0].numel()))
    return read


def token_ids(groups) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def as_policy(model) -> SimpleNamespace:
    return SimpleNamespace(base_model=model, device=model.device)


@pytest.mark.parametrize("family", [*PLAIN, *OTHER, pytest.param("nemotron_h", marks=since("5.17"))])
@pytest.mark.parametrize("system", [(), SYSTEM], ids=["distinct", "common-prefix"])
@pytest.mark.drawn(8)
def test_logprobs_are_the_models_own_and_greedy_is_its_generate(
    family, system, seed, engine_for, family_model, largest_difference
):
    model, prompts = family_model(family), random_prompts(seed, 5, system=system)
    engine = engine_for(model)
    assert engine._reads_prompts_once == (family in PLAIN)

    groups = engine.generate(prompts, 4, replace(SAMPLING, temperature=0.6))

    assert largest_difference(as_policy(model), prompts, groups, 0.6) < 1e-4
    for prompt, (completion,) in zip(prompts, engine.generate(prompts, 1, GREEDY), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=SAMPLING.max_completion_length
        )
        assert completion.token_ids == tuple(expected[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"top_k": 3, "min_p": 0.1},
        {"top_p": 0.6},
        {"stop": ("z",)},
    ],
    ids=str,
)
def test_both_loops_sample_the_same_completions(options, model, seed, engine_for, monkeypatch):
    prompts, sampling = random_prompts(seed, 6, system=SYSTEM), replace(SAMPLING, **options)
    model.generation_config = GenerationConfig(repetition_penalty=3.0, top_k=1)  # which neither reads
    ends = (1, 4, 5, 6, 7)
    expected = engine_for(model, eos_ids=ends, loop="generate").generate(prompts, 4, sampling)
    for drop_below in (0.0, 1.0):
        monkeypatch.setattr(decoder, "DROP_BELOW", drop_below)
        found = engine_for(model, eos_ids=ends, loop="decode").generate(prompts, 4, sampling)
        assert token_ids(found) == token_ids(expected)


def test_a_prompt_is_read_once_and_finished_rows_are_left_out(model, engine_for):
    prompts = [(*SYSTEM, 3), (*SYSTEM, 4, 5, 6)]
    read, without_end = read_by(model), without(model, (1,))
    engine_for(model).generate(prompts, 8, Sampling(3, seed=0))
    assert without_end is None and read[-4:] == [len(SYSTEM), 2 * 3, 16, 16]


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


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2", "mamba2"])
def test_batches_within_the_token_budget_do_not_change_a_sample(
    family, seed, engine_for, family_model, monkeypatch
):
    monkeypatch.setattr("grpo_fast.rollout.types.REPORT_SECONDS", 0.0)
    model, prompts = family_model(family), random_prompts(seed, 6)
    whole = engine_for(model).generate(prompts, 3, SAMPLING)
    engine, sizes = engine_for(model, max_batch_tokens=70).__enter__(), []
    batches = engine._batches

    def spied(pending):
        for batch in batches(pending):
            longest = max(len(row.prompt) for row in batch)
            sizes.append(len(batch) * (longest + SAMPLING.max_completion_length))
            yield batch

    done: set[int] = set()
    observer = SimpleNamespace(group_done=lambda *_: done.add(len(sizes)), progress=lambda *_: None)
    monkeypatch.setattr(engine, "_batches", spied)

    assert token_ids(engine.generate(prompts, 3, SAMPLING, observer=observer)) == token_ids(whole)

    assert len(sizes) > 1 and max(sizes) <= 70
    assert len(done) > 1  # a prompt's completions never wait for those of another batch
    alone = [engine_for(model).generate([prompt], 1, GREEDY)[0] for prompt in prompts]
    assert token_ids(alone) == token_ids(engine_for(model).generate(prompts, 1, GREEDY))


def test_a_budget_below_one_completion_and_missing_ends_are_refused(model, tokenizer, engine_for):
    parts = {"model": model, "tokenizer": tokenizer, "eos_token_ids": (1, 2), "image_reader": None}
    policy = SimpleNamespace(**parts, device=model.device, sharded=False)
    with make_engine(RolloutConfig(max_batch_tokens=14), policy) as engine:
        assert (engine.model, engine.eos_ids) == (model, (1, 2))
        with pytest.raises(ValueError, match=r"max_batch_tokens = 14.*at least 15"):
            engine.generate([(3,), (3, 4, 5)], 1, SAMPLING)
    with pytest.raises(ValueError, match="eos_ids"):
        engine_for(model, eos_ids=())


@pytest.mark.parametrize("loop", ["decode", "generate"])
def test_the_model_stays_as_it_was_after_success_and_failure(loop, model, seed, engine_for, monkeypatch):
    prompts, engine = random_prompts(seed, 3), engine_for(model, loop=loop)
    expected = engine.generate(prompts, 2, SAMPLING)
    model.train()
    model.model.layers[0].mlp.eval()
    model.gradient_checkpointing_enable()
    modes = {name: module.training for name, module in model.named_modules()}
    generation_config = model.generation_config

    assert engine.generate(prompts, 2, SAMPLING) == expected
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(model.model.layers[1].mlp, "forward", lambda *_: 1 / 0)
        engine.generate(prompts, 2, SAMPLING)

    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.generation_config is generation_config
    ids = torch.tensor([[3, 4, 5]])
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["minimax", "qwen3_next", "mamba2"])
def test_sampling_leaves_nothing_in_a_recurrent_model(family, seed, family_model, engine_for):
    model, prompts = family_model(family), random_prompts(seed, 3)
    ids = torch.randint(3, 29, (3, 9))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    engine = engine_for(model)
    first = engine.generate(prompts, 3, SAMPLING)

    assert engine.generate(prompts, 3, SAMPLING) == first
    loss = model(ids, use_cache=False).logits.float().square().mean()
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_model_that_cannot_be_sampled_is_refused_with_the_reason(model, engine_for, monkeypatch):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = BertLMHeadModel(BertConfig(vocab_size=30, initializer_range=0.5, **sizes)).eval()
    with pytest.raises(ValueError, match=r"BertLMHeadModel cannot be sampled.* nats .*rollout\.engine"):
        engine_for(bert).__enter__()

    for place in ("transformers.LlamaModel.forward", "grpo_fast.rollout.transformers.reads_prompts_once"):
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *_, **__: {}["missing"])
            with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be sampled.*KeyError.*\.engine"):
                engine_for(model).__enter__()


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=since("5.13")), "lfm2"])
def test_lora_adapters_take_part_at_once(family, family_model, seed, engine_for, largest_difference):
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(family_model(family), lora)
    prompts = random_prompts(seed, 3)

    groups = engine_for(adapted).generate(prompts, 2, SAMPLING)

    assert largest_difference(as_policy(adapted.eval().get_base_model()), prompts, groups) < 1e-4


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "minimax"])
def test_a_copy_of_its_own_samples_alike(family, seed, family_model, tokenizer, largest_difference):
    """As in mode shard, where the engine has gathered the weights."""
    policy, prompts = Policy(family_model(family), tokenizer), random_prompts(seed, 3)
    engine = OwnCopyEngine(policy)
    engine.sync(policy)
    engine.wake()

    groups = engine.generate(prompts, 2, SAMPLING)

    assert largest_difference(as_policy(policy.base_model), prompts, groups) < 1e-4
    engine.sleep()
    assert engine.freed() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_bf16_on_a_gpu_matches_its_full_forward(family, seed, engine_for, family_model, largest_difference):
    model = family_model(family).to("cuda", torch.bfloat16)
    prompts = random_prompts(seed, 5, system=SYSTEM)

    groups = engine_for(model).generate(prompts, 4, SAMPLING)

    assert largest_difference(as_policy(model), prompts, groups) < 0.3
