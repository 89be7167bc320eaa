"""What vLLM is asked for, decided without it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.config_io import load_config
from grpo_fast.rollout import Sampling, make_engine, vllm
from grpo_fast.rollout.config import RolloutConfig, VLLMConfig
from grpo_fast.rollout.vllm import IN_PROCESS, require_vllm, version_problem
from grpo_fast.rollout.vllm.engine import VLLMEngine, request_seed
from grpo_fast.rollout.vllm.sleep import GIB, SleepCycle
from grpo_fast.rollout.vllm.start import (
    adapter_arguments,
    cache_arguments,
    cached_model_folder,
    engine_arguments,
    require_device,
    require_processes,
    shares_weights,
    sleep_level,
    starting,
    stopped,
    uses_adapters,
)
from grpo_fast.run import build_trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def policy(device: str = "cuda", *, rank: int | None = None, experts: bool = False) -> Any:
    name = "model.layers.0.mlp.experts.gate_up_proj" if experts else "w"
    return SimpleNamespace(
        device=torch.device(device),
        has_adapters=rank is not None,
        base_model=SimpleNamespace(dtype=torch.bfloat16, named_parameters=lambda: iter([(name, None)])),
        model=SimpleNamespace(peft_config={"default": SimpleNamespace(r=rank)}),
    )


def asked(device: str, max_length: int | None = 9, **settings: Any) -> dict[str, Any]:
    return engine_arguments(policy(device), VLLMConfig(kv_cache_gib=1, **settings), max_length, None)


@pytest.fixture
def a_gpu(monkeypatch) -> None:
    """With 60 of 80 bytes free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))


@pytest.fixture
def installed(monkeypatch):
    return lambda version: monkeypatch.setattr(vllm, "installed_version", lambda: version)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.1.post1", "0.32.0+cpu", "0.33.0rc1"])
def test_known_versions_are_taken(version):
    assert version_problem(version) is None


@pytest.mark.parametrize("version", [None, "0.23.9", "0.34.0", "1.0.0", "dev"])
def test_unknown_versions_are_named_with_the_remedy(version):
    problem = version_problem(version)

    assert problem is not None and (version or "not installed") in problem
    assert "pip install 'vllm>=0.24,<0.34'" in problem


@pytest.mark.parametrize("version", [None, "0.5.0"])
def test_a_missing_or_unknown_vllm_is_refused_by_name_and_passed_over_by_auto(version, model, installed):
    installed(version)
    with pytest.raises(ImportError, match=r"pip install.*rollout\.engine"):
        require_vllm()

    on_gpu = SimpleNamespace(model=model, tokenizer=None, eos_token_ids=(1,), device=GPU)
    with pytest.warns(UserWarning, match="transformers") if version else nullcontext():
        assert make_engine(RolloutConfig(), on_gpu).name == "transformers"


def test_auto_stays_with_transformers_on_a_cpu(model, monkeypatch):
    monkeypatch.setattr(vllm, "installed_version", lambda: 1 / 0)
    on_cpu = SimpleNamespace(model=model, tokenizer=None, eos_token_ids=(1,), device=CPU)

    assert make_engine(RolloutConfig(), on_cpu).name == "transformers"


def test_an_engine_in_a_process_of_its_own_is_refused(monkeypatch, installed):
    installed("0.32.0")
    monkeypatch.setenv(IN_PROCESS, "1")

    with pytest.raises(ValueError, match=IN_PROCESS):
        require_vllm()


def test_a_missing_engine_is_told_before_a_policy_is_loaded_for_it(monkeypatch, installed):
    installed(None)
    monkeypatch.setattr("grpo_fast.run.load_policy", lambda *args, **settings: pytest.fail("loaded"))

    with pytest.raises(ImportError, match="pip install"):
        build_trainer(load_config("quickstart", ["rollout.engine=vllm"]))


def test_a_setting_of_the_other_engine_is_refused():
    with pytest.raises(ValueError, match=r"max_batch_tokens = 9.*rollout\.vllm\.kv_cache_gib"):
        make_engine(RolloutConfig(engine="vllm", max_batch_tokens=9), policy("cpu"))


def test_what_vllm_was_told_by_the_environment_is_left_to_it_and_its_own_settings_are_taken_back(monkeypatch):
    given = {"VLLM_LOGGING_LEVEL": "info", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "KEPT": "before"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}

    with starting(alone=True):
        inside = dict(os.environ)
        os.environ["KEPT"], os.environ["ADDED"] = "after", "x"
        del os.environ["PYTORCH_ALLOC_CONF"]
    stopped()

    assert inside["VLLM_LOGGING_LEVEL"] == "info"
    assert inside["VLLM_USE_FLASHINFER_SAMPLER"] == inside[IN_PROCESS] == "0"
    assert inside["GLOO_SOCKET_IFNAME"] == "lo"
    assert inside["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} == before


def test_a_vllm_that_fails_as_it_stops_fails_no_run(caplog):
    engine, core = VLLMEngine.__new__(VLLMEngine), SimpleNamespace(shutdown=lambda: 1 / 0)
    engine._policy, engine._cycle = policy("cpu"), SleepCycle(SimpleNamespace(), 0)
    engine._started = SimpleNamespace(engine=SimpleNamespace(engine_core=core))

    engine.close()
    engine.close()

    assert "division by zero" in caplog.text
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([(3,)], 1, Sampling(max_completion_length=1))


def test_a_model_of_the_same_content_is_compiled_under_the_same_name(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path / "cache"))
    folders = [tmp_path / name for name in ("first", "again", "other")]
    for folder, text in zip(folders, ("{}", "{}", '{"layers": 2}'), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(text)

    first, again, other = map(cached_model_folder, folders)

    assert first == again != other
    assert other.joinpath("config.json").read_text() == '{"layers": 2}'
    assert {place.name for place in first.parent.iterdir()} == {first.name, other.name}


def test_a_cache_that_cannot_be_written_holds_no_model(monkeypatch, tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path / "cache"))

    assert cached_model_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("device", "settings", "planned", "expected"),
    [
        (CPU, {}, None, {"kv_cache_memory_bytes": GIB}),
        (CPU, {"kv_cache_gib": 2.0}, None, {"kv_cache_memory_bytes": 2 * GIB}),
        # A share goes with every size: vLLM refuses to start where its default of 92 % is not free.
        (GPU, {"kv_cache_gib": 2.0}, 7, {"kv_cache_memory_bytes": 2 * GIB, "gpu_memory_utilization": 0.375}),
        (
            GPU,
            {"gpu_memory_utilization": 0.3},
            7,
            {"kv_cache_memory_bytes": 7, "gpu_memory_utilization": 0.375},
        ),
        (GPU, {"gpu_memory_utilization": 0.3}, None, {"gpu_memory_utilization": 0.3}),
        (GPU, {}, None, {"gpu_memory_utilization": 0.375}),
    ],
)
def test_memory_for_keys_and_values_goes_by_configuration_then_plan_then_share(
    a_gpu, device, settings, planned, expected
):
    assert cache_arguments(device, VLLMConfig(**settings), planned) == expected


@pytest.mark.parametrize(
    ("configured", "known", "expected"), [(99, 50, 99), (None, 50, 50), (None, None, -1)]
)
def test_the_longest_text_goes_by_configuration_then_by_the_data_then_by_the_model(
    configured, known, expected
):
    assert asked("cpu", known, max_model_length=configured)["max_model_len"] == expected


def test_only_a_cpu_runs_eagerly_unless_told(a_gpu):
    cases = {("cpu", None): True, ("cuda", None): False, ("cuda", True): True, ("cpu", False): False}

    for (device, eager), expected in cases.items():
        assert asked(device, enforce_eager=eager)["enforce_eager"] is expected


@pytest.mark.parametrize(
    ("device", "platform", "parallel", "key"),
    [
        ("cuda:0", "cuda", 2, "LOCAL_RANK = 1"),
        ("cpu", "cuda", 1, r"one for cuda.*model\.device"),
        ("cpu", "", 1, r"finds none.*model\.device"),
        ("cuda:1", "cuda", 1, "CUDA_VISIBLE_DEVICES = 1"),
    ],
)
def test_vllm_must_work_where_the_policy_lies(monkeypatch, device, platform, parallel, key):
    monkeypatch.setenv("LOCAL_RANK", "1")
    require_device(CPU, "cpu", VLLMConfig())
    require_device(torch.device("cuda:1"), "cuda", VLLMConfig(tensor_parallel_size=2))

    with pytest.raises(ValueError, match=key):
        require_device(torch.device(device), platform, VLLMConfig(tensor_parallel_size=parallel))


def test_tensor_parallelism_wants_a_process_for_each_gpu(a_gpu, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 2.*torchrun"):
        require_processes(VLLMConfig(tensor_parallel_size=2))

    monkeypatch.setenv("WORLD_SIZE", "2")
    require_processes(VLLMConfig(tensor_parallel_size=2))
    assert asked("cuda", tensor_parallel_size=2)["distributed_executor_backend"] == "external_launcher"


def test_a_torch_distributed_of_another_size_is_refused_before_vllm_joins_it(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)

    with pytest.raises(ValueError, match=r"3 processes.*tensor_parallel_size = 1"):
        require_processes(VLLMConfig())


@pytest.mark.parametrize("version", ["0.24.0", "0.25.1"])
def test_a_float32_head_wants_a_vllm_that_has_one(a_gpu, version, installed):
    installed("0.26.0")
    assert asked("cuda", fp32_head=True)["hf_overrides"] == {"head_dtype": "float32"}

    installed(version)
    with pytest.raises(ValueError, match=rf"fp32_head.*0\.26.*{version}"):
        asked("cuda", fp32_head=True)


def test_adapters_get_the_next_rank_that_vllm_takes():
    assert adapter_arguments(policy(rank=12))["max_lora_rank"] == 16
    with pytest.raises(ValueError, match=r"lora\.r = 600"):
        adapter_arguments(policy(rank=600))


def test_lora_is_merged_unless_asked_for_as_an_adapter():
    assert not uses_adapters(policy(rank=8), VLLMConfig())
    assert uses_adapters(policy(rank=8), VLLMConfig(lora_sync="adapter"))
    with pytest.raises(ValueError, match="lora_sync = 'merged'"):
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


@pytest.mark.parametrize(
    ("options", "parallel", "key"),
    [({"rank": 8}, 1, "lora_sync"), ({}, 4, "tensor_parallel_size = 4"), ({"experts": True}, 1, "experts")],
)
def test_weights_that_cannot_be_shared_are_refused_only_when_asked_for(options, parallel, key):
    config = VLLMConfig(share_weights=True, tensor_parallel_size=parallel)
    with pytest.raises(ValueError, match=f"share_weights = true.*{key}"):
        shares_weights(policy(**options), config, False)

    assert not shares_weights(policy(**options), VLLMConfig(tensor_parallel_size=parallel), False)


def test_sleep_levels_that_cannot_work_are_refused():
    assert sleep_level(policy("cpu"), VLLMConfig(), False) == 0
    assert sleep_level(policy(), VLLMConfig(), False) == "auto"
    with pytest.raises(ValueError, match="sleep_level = 1 needs a GPU"):
        sleep_level(policy("cpu"), VLLMConfig(sleep_level=1), False)
    with pytest.raises(ValueError, match="sleep_level = 2 drops the base"):
        sleep_level(policy(rank=8), VLLMConfig(sleep_level=2), True)


def test_every_completion_has_a_seed_of_its_own(rng):
    seed = int(torch.randint(2**62, (), generator=rng))
    bases, prompts = (seed, seed + 1), range(64)
    seeds = {request_seed(base, prompt, number) for base in bases for prompt in prompts for number in prompts}

    assert len(seeds) == 2 * 64 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
