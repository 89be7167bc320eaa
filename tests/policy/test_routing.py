"""Experts that are given: recorded while a model draws, carried by the table, replayed in packed forwards."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from grpo_fast.data.table import EXPERTS, UNKNOWN, CompletionTable
from grpo_fast.loop.annotate import Annotator
from grpo_fast.policy import pack
from grpo_fast.policy.architecture import rounding_nats
from grpo_fast.policy.experts import expert_blocks
from grpo_fast.policy.routing import recorded
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.transformers import TransformersEngine

from .conftest import batch_logprobs, save_model

ROUTERS = {
    **{family: {} for family in ("qwen3_moe", "mixtral", "gemma4_text", "olmoe", "granitemoe", "qwen2_moe")},
    "glm4_moe": {"n_group": 2, "topk_group": 2},
    "ernie4_5_moe": {},
    # Hybrids, whose recurrent layers compute prompts and completions apart, and their experts together.
    "qwen3_next": {},
    "granitemoehybrid": {},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},  # latent attention, and groups of experts
}


def route_by_hand(policy, row_choices, others):
    """Hooks by which the routers return (t, L, 2) given experts; `others` (t, L): they would not have."""

    def hook(number, router, args, output):
        logits, _, own = output
        chosen = row_choices[:, number].long()
        others[:, number] = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
        weights = logits.softmax(-1).gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    blocks = expert_blocks(policy.base_model)
    return [block.gate.register_forward_hook(partial(hook, number)) for number, block in blocks.items()]


def random_choices(rng, tokens):
    """(tokens, 2 layers, 2 experts), two different ones of 4."""
    return torch.rand(tokens, 2, 4, generator=rng).argsort(-1)[..., :2].to(torch.int16)


@pytest.mark.parametrize("recomputed", [False, True, "mlp"])
def test_replayed_experts_give_logprobs_and_gradients_of_routing_by_hand(
    load, folder_of, rng, samples, recomputed
):
    folder = str(folder_of("qwen3_moe", norm_topk_prob=True))
    policy = load("qwen3_moe", path=folder, gradient_checkpointing=recomputed, router_replay=True)
    choices = random_choices(rng, len(samples.prompt_ids) + len(samples.token_ids))
    table = replace(samples, inputs={EXPERTS: choices})
    (batch,) = pack(table, max_tokens=10_000, device="cpu")

    packed = batch_logprobs(policy, batch)
    weights = torch.randn(len(packed), generator=rng)
    (weights * packed).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.trainable().items()}
    counted = policy.routing.differing()

    policy.model.zero_grad()
    own, others = torch.zeros(len(table.token_ids)), torch.zeros(len(choices), 2, dtype=torch.bool)
    for row in range(len(table)):
        prompt, tokens = table.prompt_of(row), table.tokens_of(row)
        first = int(table.prompt_offsets[table.prompts[row]])
        begin = len(table.prompt_ids) + int(table.offsets[row])
        told = torch.cat([choices[first : first + len(prompt)], choices[begin : begin + len(tokens)]])
        differ = torch.zeros(len(told), 2, dtype=torch.bool)
        hooks = route_by_hand(policy, told, differ)
        logits = policy.base_model(input_ids=torch.cat([prompt, tokens])[None], use_cache=False).logits[0]
        found = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        places = slice(int(table.offsets[row]), int(table.offsets[row + 1]))
        own[places] = found.detach()
        order = {int(token): i for i, token in enumerate(batch.token_index)}
        own_weights = weights[[order[i] for i in range(places.start, places.stop)]]
        (own_weights * found).sum().backward()
        for hook in hooks:
            hook.remove()
        others[first : first + len(prompt)] = differ[: len(prompt)]
        others[begin : begin + len(tokens) - 1] = differ[len(prompt) : -1]  # the last one is not read

    torch.testing.assert_close(packed.detach(), own[batch.token_index], atol=1e-4, rtol=1e-4)
    for name, parameter in policy.trainable().items():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-3, rtol=1e-3)
    assert any(gradients[name].abs().max() > 0 for name in gradients if name.endswith("gate.weight"))
    assert counted == {"experts/differing": others.sum(), "experts/replayed": 2 * (len(choices) - len(table))}
    assert policy.routing.differing() == {}


@pytest.mark.parametrize("family", ROUTERS)
@pytest.mark.drawn(4)
def test_an_update_computes_with_the_experts_that_the_rollout_chose(family, load, tmp_path, rng):
    policy = load(path=str(save_model(tmp_path, family, **ROUTERS[family])), router_replay=True)
    engine = TransformersEngine(
        policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids, tells_experts=True
    )
    begin = torch.randint(4, 61, (20,), generator=rng).tolist()
    prompts = [[*begin, *torch.randint(4, 61, (n,), generator=rng).tolist()] for n in (1, 5, 3)]

    groups = engine.generate(prompts, 3, Sampling(max_completion_length=6, seed=3))

    flat = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    for prompt, completion in flat:
        assert len(completion.experts) == len(prompt) + len(completion.token_ids) - 1
    table = CompletionTable.of(
        [prompt for prompt, _ in flat],
        [c.token_ids for _, c in flat],
        sampler_logprobs=[c.logprobs for _, c in flat],
        inputs={EXPERTS: [c.experts for _, c in flat]},
    )
    annotator = Annotator(policy, micro_batch_tokens=10_000)
    apart = (annotator.columns(table)[0] - table.columns["sampler_logprobs"]).abs()
    assert apart.mean() < rounding_nats(torch.float32, "cpu")

    blocks = expert_blocks(policy.base_model)
    with torch.no_grad():
        for block in blocks.values():
            for weight in block.parameters():
                if weight.ndim == 2 and len(weight) == 4:
                    weight.copy_(torch.randn(weight.shape, generator=rng))
    with recorded(policy.base_model) as take:
        annotator.columns(table)
        (replayed,) = take()
        annotator.columns(replace(table, inputs={}))
        (alone,) = take()
    (batch,) = annotator.packed(table)
    given = table.inputs[EXPERTS][batch.input_index][:, [*blocks]]
    assert (given != UNKNOWN).all()
    assert torch.equal(replayed[:, [*blocks]].sort(-1).values, given.sort(-1).values)
    assert not torch.equal(alone[:, [*blocks]].sort(-1).values, given.sort(-1).values)


def test_a_reference_that_is_the_model_without_adapters_routes_by_itself(load, rng, samples):
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    policy = load("qwen3_moe", lora=lora, router_replay=True)
    choices = random_choices(rng, len(samples.prompt_ids) + len(samples.token_ids))
    annotator = Annotator(policy, micro_batch_tokens=10_000)

    given = replace(samples, inputs={EXPERTS: choices})

    assert torch.equal(annotator.reference_logprobs(given), annotator.reference_logprobs(samples))
    assert not torch.equal(annotator.columns(given)[0], annotator.columns(samples)[0])


def test_a_model_without_experts_or_whose_experts_cannot_be_given_is_refused(load):
    with pytest.raises(ValueError, match="router_replay = true, and LlamaForCausalLM has no experts in"):
        load("llama", router_replay=True)
    with pytest.raises(ValueError, match="PhimoeSparseMoeBlock in layer 0 does not compute with the experts"):
        load("phimoe", router_replay=True)  # whose router takes the best score, twice
