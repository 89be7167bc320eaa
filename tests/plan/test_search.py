"""The search: what it chooses fits, and one more does not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.memory import parts_bytes
from grpo_fast.plan.model_shape import ModelShape, model_shape
from grpo_fast.plan.report import plan
from grpo_fast.plan.search import MOST_GENERATIONS, SPARE, Choice, Search, levers, too_large
from grpo_fast.plan.sizes import EXPECTED

LEVEL = "rollout.vllm.sleep_level"
OFFLOADS = ["gradients", "optimizer", "master"]


def gpu(total: int) -> DeviceBudget:
    return replace(device_budget("H200"), total=total)


def least(config: TrainConfig, shape: ModelShape, more: int = 0) -> int:
    """Return the bytes that the smallest step takes, and so many MiB more."""
    search = Search(config, shape, gpu(2 << 30))
    return (2 << 30) - search.least().free + (more << 20)


@pytest.fixture(scope="module")
def shape(config: Any, run: Any) -> ModelShape:
    return model_shape(config("llama", num_hidden_layers=2), run().model)


def test_the_largest_group_fits_and_one_more_does_not(shape: ModelShape, run: Any) -> None:
    total = least(run(2), shape, 5)

    group = Search(run(2), shape, gpu(total)).largest_generations()

    def fits(generations: int) -> bool:
        return Search(run(generations), shape, gpu(total)).least().free >= 0

    assert 2 < group < MOST_GENERATIONS and fits(group) and not fits(group + 1)


def test_more_memory_never_chooses_less(shape: ModelShape, run: Any) -> None:
    """On budgets from next to nothing to plenty, what costs time goes first."""
    choices = [Search(run(), shape, gpu(least(run(), shape, more))).choose() for more in (40, 80, 160, 2000)]

    assert all(choice is not None and choice.free >= 0 for choice in choices)
    busy = [choice.busy for choice in choices]
    assert busy == sorted(busy)
    assert choices[-1].values[LEVEL] == 0 and choices[-1].values["memory.offload"] == []
    assert choices[-1].values["model.gradient_checkpointing"] is False


@pytest.mark.parametrize(("more", "spare"), [(8, 0), (50, SPARE)], ids=["scarce", "a share is left"])
def test_no_more_in_flight_and_no_larger_micro_batch_would_fit(
    more: int, spare: float, shape: ModelShape, run: Any
) -> None:
    total = least(run(64), shape, more)

    found = Search(run(64), shape, gpu(total)).choose()

    sizes, left = found.sizes, int(spare * total)
    assert found.free >= left and sizes.in_flight < 1024 and found.values[LEVEL] != 0
    assert EXPECTED <= sizes.expected < 100  # of the longest completion
    for larger in (
        {"most_in_flight": sizes.in_flight + 1},
        {"micro_batch_tokens": sizes.micro_batch.inputs + 64},
    ):
        assert Choice(found.setup, replace(sizes, **larger)).free < left


def test_lora_is_merged_where_a_second_copy_fits_and_else_an_adapter(config: Any, run: Any) -> None:
    lora = {"lora": {"r": 8}}
    shape = model_shape(config("llama", num_hidden_layers=8), run(model=lora).model)

    def synced(total: int, **vllm: Any) -> tuple[Any, Any]:
        found = Search(run(model=lora, rollout={"vllm": vllm}), shape, gpu(total)).choose()
        assert found is not None and found.free >= 0
        return found.values.get("rollout.vllm.lora_sync"), found.values[LEVEL]

    def needed(way: str) -> int:
        return least(run(model=lora, rollout={"vllm": {"lora_sync": way}}), shape)

    assert needed("merged") - needed("adapter") > shape.bytes // 2  # a second copy
    assert synced(4 << 30) == ("merged", 0)
    assert synced((needed("merged") + needed("adapter")) // 2) == ("adapter", 1)
    assert synced(4 << 30, lora_sync="adapter") == ("adapter", 0)
    assert synced(4 << 30, sleep_level=2) == (None, 2)  # an adapter's base would be dropped


def test_a_setting_by_hand_stays_and_a_micro_batch_is_halved(shape: ModelShape, run: Any) -> None:
    halved = Search(run(micro_batch_tokens=50_000), shape, gpu(least(run(), shape, 20))).choose()
    kept = Search(run(micro_batch_tokens=300), shape, gpu(2 << 30)).choose()
    hand = {"model": {"gradient_checkpointing": True}, "memory": {"offload": ["master"]}}
    by_hand = Search(run(**hand), shape, gpu(2 << 30)).choose()

    assert 128 <= halved.sizes.micro_batch_tokens < 50_000
    assert kept.sizes.micro_batch_tokens == 300
    assert by_hand.values["model.gradient_checkpointing"] is True
    assert by_hand.values["memory.offload"] == ["master"]


def test_no_more_is_offloaded_than_the_host_holds(config: Any, run: Any) -> None:
    shape = model_shape(config("llama", num_hidden_layers=8, vocab_size=200), run().model)
    sleeping = run(rollout={"vllm": {"sleep_level": 1}})
    state = parts_bytes(Search(sleeping, shape, gpu(2 << 30)).least().setup, OFFLOADS[:2])

    def offloaded(host: int) -> list[str]:
        return Search(sleeping, shape, replace(gpu(2 << 30), host=host)).least().values["memory.offload"]

    assert offloaded(state) == OFFLOADS[:2] and offloaded(state - 1) == OFFLOADS[:1]


def test_the_error_names_what_makes_room(shape: ModelShape, run: Any) -> None:
    def offered(**sections: Any) -> set[str]:
        return {*levers(Search(run(**sections), shape, gpu(1 << 20)))}

    by_hand = {"model": {"gradient_checkpointing": False}, "memory": {"offload": "none"}}
    lora = offered(model={"lora": {"r": 8}}, rollout={"vllm": {"lora_sync": "merged"}})
    teacher = run(method="opd", reference={"path": "a/teacher"})
    taught = Search(teacher, replace(shape, reference=1 << 30), gpu(1 << 20))
    assert {"reference.quantization=nf4", "loss.beta=0"} & {*levers(taught)} == {"reference.quantization=nf4"}
    assert "with reference.path = 'a/teacher' does not fit H200" in too_large(taught)
    message = too_large(Search(run(), shape, gpu(1 << 20)))
    assert re.search(r"does not fit H200: 16 prompts .* more than its 1\.0 MiB.*a larger GPU$", message)
    full = {"model.train_lm_head=false", "optimizer.kind=adamw_8bit", "model.lora={}"}
    assert full <= offered() and not full & lora
    assert "rollout.vllm.lora_sync=adapter" in lora  # merged weights are a second copy
    more = {"memory.offload=auto", "model.gradient_checkpointing=auto", "loss.beta=0"}
    assert more <= offered(**by_hand, loss={"beta": 0.1}) and "memory.offload=auto" not in offered()


@pytest.mark.parametrize(
    ("sections", "ranks", "message"),
    [
        ({"dataset": {"source": "any.jsonl"}}, 1, r"dataset\.max_prompt_length"),
        ({"algorithm": "dpo", "rewards": []}, 1, "algorithm"),
        ({"prompts_per_step": 7}, 8, r"prompts_per_step = 7 .* 8 ranks"),
        ({"distributed": {"mode": "shard"}, "memory": {"offload": ["reference"]}}, 2, "reference"),
    ],
)
def test_a_run_that_cannot_be_planned_is_refused(
    sections: Any, ranks: int, message: str, shape: ModelShape, run: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(run(**sections), shape, replace(gpu(1 << 30), ranks=ranks))


def test_several_gpus_shard_what_does_not_fit_whole(config: Any, run: Any) -> None:
    """A model whose layers and state are far more than one layer."""
    config = config("llama", num_hidden_layers=8, vocab_size=200)
    shape = model_shape(config, run().model)

    def mode(total: int) -> str:
        found = plan(run(), shape, replace(gpu(total), ranks=4))
        assert found.choice.free >= 0
        return found.choice.values["distributed.mode"]

    needed = [
        (8 << 30) - Search(run(distributed={"mode": m}), shape, replace(gpu(8 << 30), ranks=4)).least().free
        for m in ("replicate", "shard")
    ]
    assert needed[1] < needed[0]
    assert (mode(8 << 30), mode(sum(needed) // 2)) == ("replicate", "shard")
