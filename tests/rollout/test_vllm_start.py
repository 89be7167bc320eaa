"""What vLLM is asked for, decided without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.config import RolloutConfig
from grpo_fast.rollout import make_engine, vllm_process, vllm_version
from grpo_fast.rollout.vllm_choices import shares_weights, sleep_level, uses_adapters
from grpo_fast.rollout.vllm_config import VLLMConfig
from grpo_fast.rollout.vllm_process import IN_PROCESS, require_vllm
from grpo_fast.rollout.vllm_requests import request_seed
from grpo_fast.rollout.vllm_start import (
    GIB,
    adapter_arguments,
    cache_arguments,
    engine_arguments,
    require_device,
)
from grpo_fast.rollout.vllm_version import version_problem


def policy(device: str = "cuda", *, rank: int | None = None) -> Any:
    return SimpleNamespace(
        device=torch.device(device),
        has_adapters=rank is not None,
        base_model=SimpleNamespace(dtype=torch.bfloat16),
        model=SimpleNamespace(peft_config={"default": SimpleNamespace(r=rank)}),
    )


@pytest.mark.parametrize("version", ["0.24.0", "0.26.1.post1", "0.32.0+cpu", "0.33.0rc1"])
def test_known_versions_are_taken(version):
    assert version_problem(version) is None


@pytest.mark.parametrize("version", [None, "0.23.9", "0.34.0", "1.0.0", "dev"])
def test_unknown_versions_are_named_with_the_remedy(version):
    problem = version_problem(version)

    assert problem is not None and (version or "not installed") in problem
    assert "pip install 'vllm>=0.24,<0.34'" in problem


@pytest.mark.parametrize("version", [None, "0.5.0"])
def test_a_missing_or_unknown_vllm_is_refused_by_name_and_passed_over_by_auto(version, model, monkeypatch):
    for module in (vllm_version, vllm_process):
        monkeypatch.setattr(module, "installed_version", lambda: version)
    with pytest.raises(ImportError, match=r"pip install.*rollout\.engine to transformers"):
        require_vllm()

    on_gpu = SimpleNamespace(model=model, tokenizer=None, eos_token_ids=(1,), device=torch.device("cuda"))
    with warnings_where(version is not None):
        assert make_engine(RolloutConfig(), on_gpu).name == "transformers"


def warnings_where(expected: bool) -> Any:
    from contextlib import nullcontext

    return pytest.warns(UserWarning, match="takes transformers") if expected else nullcontext()


def test_an_engine_in_a_process_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_process, "installed_version", lambda: "0.32.0")
    monkeypatch.setenv(IN_PROCESS, "1")

    with pytest.raises(ValueError, match=f"{IN_PROCESS} = '1'"):
        require_vllm()


def test_auto_stays_with_transformers_on_a_cpu(model, monkeypatch):
    monkeypatch.setattr(vllm_version, "installed_version", lambda: 1 / 0)
    on_cpu = SimpleNamespace(model=model, tokenizer=None, eos_token_ids=(1,), device=torch.device("cpu"))
    assert make_engine(RolloutConfig(), on_cpu).name == "transformers"


def test_a_setting_of_the_other_engine_is_refused():
    with pytest.raises(ValueError, match=r"max_batch_tokens = 9.*rollout\.vllm\.kv_cache_gib"):
        make_engine(RolloutConfig(engine="vllm", max_batch_tokens=9), policy("cpu"))


def test_memory_for_keys_and_values_goes_by_configuration_then_plan_then_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    fixed = VLLMConfig(kv_cache_gib=2.0)

    assert cache_arguments(gpu, fixed, 7) == {"kv_cache_memory_bytes": 2 * GIB}
    assert cache_arguments(gpu, VLLMConfig(), 7) == {"kv_cache_memory_bytes": 7}
    assert cache_arguments(cpu, VLLMConfig(), None) == {"kv_cache_memory_bytes": GIB}
    by_share = VLLMConfig(gpu_memory_utilization=0.3)
    assert cache_arguments(gpu, by_share, None) == {"gpu_memory_utilization": 0.3}
    assert cache_arguments(gpu, VLLMConfig(), None) == {"gpu_memory_utilization": 0.375}


@pytest.mark.parametrize(("configured", "known", "asked"), [(99, 50, 99), (None, 50, 50), (None, None, -1)])
def test_the_longest_text_goes_by_configuration_then_by_the_data_then_by_the_model(configured, known, asked):
    config = VLLMConfig(max_model_length=configured)

    assert engine_arguments(policy("cpu"), config, known, None)["max_model_len"] == asked


def test_only_a_cpu_runs_eagerly_unless_told():
    assert [
        engine_arguments(policy(device), VLLMConfig(enforce_eager=eager, kv_cache_gib=1), 9, None)[
            "enforce_eager"
        ]
        for device, eager in (("cpu", None), ("cuda", None), ("cuda", True), ("cpu", False))
    ] == [True, False, True, False]


def test_vllm_must_work_where_the_policy_lies():
    require_device(torch.device("cpu"), "cpu", VLLMConfig())
    require_device(torch.device("cuda:1"), "cuda", VLLMConfig(tensor_parallel_size=2))
    with pytest.raises(ValueError, match=r"policy is on cpu.*one for cuda.*model\.device"):
        require_device(torch.device("cpu"), "cuda", VLLMConfig())
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES = 1"):
        require_device(torch.device("cuda:1"), "cuda", VLLMConfig())


def test_tensor_parallelism_wants_a_process_for_each_gpu(monkeypatch):
    config = VLLMConfig(tensor_parallel_size=2, kv_cache_gib=1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 2.*torchrun --nproc-per-node 2"):
        engine_arguments(policy(), config, 9, None)

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert engine_arguments(policy(), config, 9, None)["distributed_executor_backend"] == "external_launcher"


def test_adapters_get_the_next_rank_that_vllm_takes():
    assert adapter_arguments(policy(rank=12))["max_lora_rank"] == 16
    with pytest.raises(ValueError, match=r"r = 600.*512.*merged"):
        adapter_arguments(policy(rank=600))


def test_lora_is_merged_unless_asked_for_as_an_adapter():
    assert not uses_adapters(policy(rank=8), VLLMConfig())
    assert uses_adapters(policy(rank=8), VLLMConfig(lora_sync="adapter"))
    with pytest.raises(ValueError, match=r"lora_sync = 'merged'.*no LoRA"):
        uses_adapters(policy(), VLLMConfig(lora_sync="merged"))


@pytest.mark.parametrize(
    ("device", "rank", "adapters", "config", "expected"),
    [
        ("cuda", None, False, {}, True),
        ("cpu", None, False, {}, False),
        ("cpu", None, False, {"share_weights": True}, True),
        ("cuda", None, False, {"share_weights": False}, False),
        ("cuda", 8, True, {}, True),
        ("cuda", 8, False, {}, False),
        ("cuda", None, False, {"tensor_parallel_size": 2}, False),
    ],
)
def test_weights_are_shared_where_they_can_be(device, rank, adapters, config, expected):
    assert shares_weights(policy(device, rank=rank), VLLMConfig(**config), adapters) is expected


def test_weights_that_cannot_be_shared_are_refused_when_asked_for():
    with pytest.raises(ValueError, match=r"merged LoRA.*lora_sync to adapter"):
        shares_weights(policy(rank=8), VLLMConfig(share_weights=True), False)
    with pytest.raises(ValueError, match="tensor_parallel_size = 4"):
        shares_weights(policy(), VLLMConfig(share_weights=True, tensor_parallel_size=4), False)


def test_sleep_levels_that_cannot_work_are_refused():
    assert sleep_level(policy("cpu"), VLLMConfig(), False) == 0
    assert sleep_level(policy(), VLLMConfig(), False) == "auto"
    with pytest.raises(ValueError, match="sleep_level = 1 needs a GPU"):
        sleep_level(policy("cpu"), VLLMConfig(sleep_level=1), False)
    with pytest.raises(ValueError, match="sleep_level = 2 drops the base"):
        sleep_level(policy(rank=8), VLLMConfig(sleep_level=2), True)


def test_every_completion_has_a_seed_of_its_own(rng):
    seed = int(torch.randint(2**62, (), generator=rng))
    seeds = {
        request_seed(base, prompt, number)
        for base in (seed, seed + 1)
        for prompt in range(64)
        for number in range(64)
    }

    assert len(seeds) == 2 * 64 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
