from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.config import TrainConfig
from grpo_fast.distributed.shards import rows_of
from grpo_fast.distributed.world import World
from grpo_fast.plan import auto
from grpo_fast.plan.auto import resolve_auto
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.prediction import PHASES, Predictor
from grpo_fast.plan.scaling import drawn_lengths, scaling, step_seconds
from grpo_fast.plan.search import Search, divisions, plan
from grpo_fast.plan.seconds import update_exchange
from grpo_fast.plan.sizes import StepSizes, Work
from grpo_fast.plan.trace import Traces
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.policy.config import OptimizerConfig
from grpo_fast.rollout import vllm

SIZES = StepSizes(prompts=4, generations=4, prompt_length=40, completion_length=32, micro_batch_tokens=10**6)


def run(mode: str = "auto", head: str = "auto", **changes: Any) -> TrainConfig:
    sections = {
        "model": {"path": "-", "attention": "flash_attention_2"},
        "dataset": {"source": "any.jsonl", "max_prompt_length": 64},
        "rewards": [{"reward": "length"}],
        "rollout": {"num_generations": 8, "max_completion_length": 64},
        "distributed": {"mode": mode, "head": head},
    }
    return TrainConfig.model_validate(sections | changes)


def gpus(ranks: int, **changes: Any) -> DeviceBudget:
    return replace(device_budget("H100"), ranks=ranks, **changes)


@pytest.fixture(scope="module")
def traces(config: Any) -> Traces:
    return Traces(config("llama"))


def update(predictor: Any, traces: Traces, ranks: int, mode: str, head: str = "auto", **keys: Any) -> Any:
    sections = {"distributed": {"mode": mode, "head": head}}
    found = predictor(traces, gpus(ranks), sections, dtype="bfloat16", **keys)
    return found.predict(SIZES).parts["update"]


def test_each_rank_holds_what_was_predicted(traces: Traces, predictor: Any, config: Any) -> None:
    ranks = 3
    model = AutoModelForCausalLM.from_config(config("llama"), dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    worlds = [World(rank, ranks) for rank in range(ranks)]
    optimizers = [PolicyOptimizer(parameters, OptimizerConfig(), total_steps=1, world=w) for w in worlds]
    masters = [sum(m.nbytes for m in one.masters().values()) for one in optimizers]
    rows = [sum(rows_of(p, world).nbytes for p in parameters.values()) for world in worlds]

    whole, sharded = (update(predictor, traces, ranks, mode) for mode in ("replicate", "shard"))

    numbers, uneven = sum(p.numel() for p in parameters.values()), 1.03  # the first ranks' rows are more
    assert whole["master"] == sharded["master"] == -(-sum(masters) // ranks)
    assert sum(masters) == 4 * numbers and max(masters) <= uneven * whole["master"]
    assert whole["optimizer"] == -(-8 * numbers // ranks) + 512 * len(parameters)
    buffers = optimizers[0].gradient_buffers().values()
    assert whole["gradients"] == sum(buffer.nbytes for buffer in buffers)
    assert (whole["weights"], sharded["weights"]) == (sum(rows), -(-sum(rows) // ranks))
    assert max(rows) <= uneven * sharded["weights"]
    assert sharded["gradients"] == 2 * sharded["weights"]
    assert "exchange" not in sharded and "gathered" not in whole


def test_a_layer_and_a_gathered_head_are_whole_in_a_backward(traces: Traces, predictor: Any) -> None:
    def gathered(head: str, **keys: Any) -> int:
        return update(predictor, traces, 2, "shard", head, **keys)["gathered"]

    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128
    assert gathered("sharded") == (2 * 2 + 2 + 4) * layer
    assert gathered("gathered") - gathered("sharded") == (2 + 2) * 1000 * 128
    frozen = gathered("gathered", train_lm_head=False) - gathered("sharded", train_lm_head=False)
    assert frozen == 2 * 1000 * 128


def test_one_rank_is_planned_as_ever(traces: Traces) -> None:
    plain, sharded = (plan(run(mode), traces, gpus(1)).choice for mode in ("auto", "shard"))

    assert (plain.parts, plain.seconds, plain.values) == (sharded.parts, sharded.seconds, sharded.values)
    assert plain.exchange == dict.fromkeys(PHASES, 0.0)


def test_what_ranks_exchange_takes_what_arithmetic_by_hand_says(traces: Traces) -> None:
    shape = traces.shape(run().model)

    def seconds(mode: str, head: str, device: DeviceBudget) -> float:
        config = run(mode, head, minibatches=2, old_logprobs="sampler")
        return update_exchange(Predictor(config, traces, device), Work(0, 0, targets=100, count=3))

    numbers, table, hops = shape.bytes // 2, 1000 * 128, 5e-6
    rate = 0.8 * 450e9
    # Two optimiser steps: float32 gradients and 16-bit weights, three quarters of them from others, in rings
    # of three hops.
    assert seconds("replicate", "gathered", gpus(4)) == pytest.approx(
        2 * 6 * numbers * 3 / 4 / rate + 2 * 2 * 3 * hops
    )
    # Six micro-batches, each with weights twice and gradients once: of three layers, embedding and head.
    body, calls = 8 * (numbers - table), 6 * 3 * 5 * 3 * hops
    gathered = 6 * (body + 6 * table) * 3 / 4 / rate + calls
    assert seconds("shard", "gathered", gpus(4)) == pytest.approx(gathered)
    sharded = 6 * (body + 6 * 128 * 100 * 4) * 3 / 4 / rate + calls
    assert seconds("shard", "sharded", gpus(4)) == pytest.approx(sharded)
    # Two nodes of two: each GPU has 50 GB/s to the other.
    slower = (seconds("shard", "gathered", gpus(4, node=2)) - calls) / (gathered - calls)
    assert slower == pytest.approx(450 / 100)


def test_the_plan_and_a_run_shard_what_does_not_fit_whole(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose layers and state are far more than one layer."""
    traces = Traces(config("llama", num_hidden_layers=8, vocab_size=200))
    needed = []
    for mode in ("replicate", "shard"):
        mine = run(mode, "gathered")
        least = Search(mine, traces, gpus(4)).least()
        needed.append(max(map(least.total, PHASES)))

    roomy, scarce = (plan(run(), traces, gpus(4, total=total)) for total in (8 << 30, sum(needed) // 2))

    assert (roomy.choice.mode, scarce.choice.mode) == ("replicate", "shard")
    assert scarce.choice.free >= 0 > scarce.rivals[0].free
    assert roomy.rivals[0].free >= 0 and roomy.rivals[0].cost > roomy.choice.cost
    monkeypatch.setattr(auto, "traces_of", lambda *_: traces)
    monkeypatch.setattr(auto, "model_config", lambda *_, **__: traces.config)
    monkeypatch.setattr(auto, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(auto, "device_budget", lambda: gpus(1, total=sum(needed) // 2))
    monkeypatch.setattr(vllm, "installed_version", lambda: "0.33.0")
    resolved = resolve_auto(run(), ranks=4)
    assert resolved.distributed == scarce.choice.predictor.run.distributed
    assert resolved.micro_batch_tokens == scarce.choice.sizes.micro_batch_tokens


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (8, {"prompts_per_step": 7}, r"prompts_per_step = 7 .* 8 ranks"),
        (2, {"distributed": {"mode": "shard", "head": "sharded"}}, r"distributed\.head = 'sharded'"),
        (2, {"distributed": {"mode": "shard"}, "memory": {"offload": ["reference"]}}, "reference"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    ranks: int, changes: dict[str, Any], message: str, config: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        divisions(run(**changes), config("qwen2"), gpus(ranks))

    assert divisions(run(**changes), config("qwen2"), gpus(1)) == [run(**changes)]


def test_ranks_on_a_cpu_replicate_and_one_of_too_few_prompts_is_refused(toy: dict[str, Any]) -> None:
    mine = TrainConfig.model_validate(toy | {"prompts_per_step": 2})

    found = resolve_auto(mine, ranks=2)

    assert found.distributed.mode == "replicate"
    assert found.distributed.head in ("gathered", "sharded")
    assert resolve_auto(mine).distributed == mine.distributed
    with pytest.raises(ValueError, match="3 ranks"):
        resolve_auto(mine, ranks=3)


def test_equal_completions_take_on_one_rank_what_the_plan_predicts(traces: Traces) -> None:
    choice = plan(run(prompts_per_step=4), traces, gpus(1)).choice
    sizes = choice.sizes

    found = step_seconds(choice, [[sizes.completion_length] * 8] * 4)

    assert found["rollout"] == pytest.approx(choice.seconds["rollout"], rel=1e-3)
    assert found["update"] == pytest.approx(choice.seconds["update"], rel=1e-3)
    assert [found[phase] for phase in ("waiting", "communication", "exchange")] == [0, 0, 0]


def test_the_slowest_rank_is_waited_for(traces: Traces) -> None:
    """2 ms a token, for the model is small."""
    choice = plan(run(prompts_per_step=2), traces, gpus(2)).choice

    found = step_seconds(choice, [[10, 20], [40, 4]])

    assert found["rollout"] == pytest.approx((20 + 40) / 2 * 2e-3, rel=1e-3)
    assert found["waiting"] == pytest.approx(10 * 2e-3, rel=0.2)  # and a little in the update
    one_by_one = replace(choice, sizes=replace(choice.sizes, most_in_flight=1))
    assert step_seconds(one_by_one, [[10, 20], [40, 4]])["rollout"] == pytest.approx(37 * 2e-3, rel=1e-3)


def test_efficiency_is_of_the_gpu_seconds_of_the_fewest(traces: Traces) -> None:
    alone, both = scaling(run(), traces, [gpus(1), gpus(2)], prompt_length=64)

    assert (alone.gpus, alone.efficiency, both.gpus) == (1, 1, 2)
    assert both.efficiency == pytest.approx(sum(alone.seconds.values()) / (2 * sum(both.seconds.values())))
    with pytest.raises(ValueError, match=r"80GiB.*published"):
        scaling(run(), traces, [replace(device_budget("80GiB"), ranks=2)], prompt_length=64)


def test_drawn_lengths_keep_the_limit_and_those_of_a_prompt_are_alike() -> None:
    lengths = torch.tensor(drawn_lengths((400, 64), 1000, 0)).float()

    assert lengths.min() >= 1 and lengths.max() == 1000
    assert lengths.median() == pytest.approx(500, rel=0.05)
    logs = lengths.log()
    assert logs.std() == pytest.approx(0.4, abs=0.04)
    assert logs.mean(1).var() / logs.var() == pytest.approx(0.5, abs=0.1)
