"""What vLLM is asked for, decided without it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_fast.config.load import load_config
from grpo_fast.config.rollout import RolloutConfig, VLLMConfig
from grpo_fast.distributed.world import World
from grpo_fast.policy.out_of_memory import ALLOCATOR, EXPANDABLE, expand_segments
from grpo_fast.rollout import make_engine, require_engine, vllm
from grpo_fast.rollout.vllm import IN_PROCESS, engine, require_vllm, settings, start, version_problem
from grpo_fast.rollout.vllm.settings import (
    MOST_FREE,
    choose,
    engine_arguments,
    graph_sizes,
    memory_arguments,
    require_positions,
)
from grpo_fast.rollout.vllm.sleep import GIB, release_pool
from grpo_fast.rollout.vllm.start import (
    cached_model_folder,
    require_device,
    require_processes,
    starting,
    stopped,
)
from grpo_fast.run import build_trainer


def policy(device: str = "cuda", *, rank: int | None = None, experts: bool = False, **given: Any) -> Any:
    name = "model.layers.0.mlp.experts.gate_up_proj" if experts else "w"
    return SimpleNamespace(
        device=torch.device(device),
        has_adapters=rank is not None,
        base_model=SimpleNamespace(
            dtype=torch.bfloat16, named_parameters=lambda: iter([(name, None)]), modules=lambda: iter(())
        ),
        **{
            "sharded": False,
            "quantized": False,
            "tokenizer": None,
            "eos_token_ids": (1,),
            "image_reader": None,
        }
        | given,
        **({} if "model" in given else {"model": SimpleNamespace(peft_config={"": SimpleNamespace(r=rank)})}),
    )


@pytest.fixture
def installed(monkeypatch):
    def installed(version: str | None) -> None:
        for module in (vllm, settings, start):
            monkeypatch.setattr(module, "installed_version", lambda: version)

    return installed


@pytest.mark.parametrize("version", [None, "0.23.9", "0.34.0", "dev"])
def test_auto_passes_over_a_missing_or_unknown_vllm(version, model, installed):
    assert not any(map(version_problem, ("0.24.0", "0.26.1.post1", "0.32.0+cpu", "0.33.0rc1")))
    installed("0.32.0")
    assert make_engine(RolloutConfig(), policy("cpu", model=model)).name == "transformers"
    installed(version)
    with pytest.raises(ImportError, match=rf"{version or 'not installed'}.*pip install.*rollout\.engine"):
        require_vllm()
    with pytest.warns(UserWarning, match="transformers") if version else nullcontext():
        assert make_engine(RolloutConfig(), policy("cuda", model=model)).name == "transformers"


def test_positions_that_vllm_would_not_stretch_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for ropes in (rope, {"full_attention": rope}):
        config = AutoConfig.for_model("llama", max_position_embeddings=64)
        config.rope_parameters = ropes
        require_positions(config, 64)
        with pytest.raises(ValueError, match=r"up to 65 tokens .* 64 positions.*rollout\.engine"):
            require_positions(config, 65)
    require_positions(AutoConfig.for_model("llama", max_position_embeddings=64), 65)


def test_what_would_fail_later_is_refused_before_a_policy_is_loaded(monkeypatch, installed):
    monkeypatch.setattr("grpo_fast.run.build.load_policy", lambda *args, **settings: pytest.fail("loaded"))
    installed(None)
    with pytest.raises(ImportError, match="pip install"):
        build_trainer(load_config("quickstart", ["rollout.engine=vllm"]))

    installed("0.32.0")
    with pytest.raises(ValueError, match=r"max_batch_tokens = 9.*rollout\.vllm\.kv_cache_gib"):
        require_engine(RolloutConfig(engine="vllm", max_batch_tokens=9))
    parallel = RolloutConfig(vllm=VLLMConfig(tensor_parallel_size=2))
    require_engine(parallel, 4)
    for ranks in (1, 3):
        with pytest.raises(ValueError, match=rf"parallel_size = 2 does not divide.* {ranks}; .*torchrun"):
            require_engine(parallel, ranks)
    monkeypatch.setenv(IN_PROCESS, "1")
    with pytest.raises(ValueError, match=IN_PROCESS):
        require_vllm()


def test_a_start_leaves_the_environment_as_it_was(monkeypatch):
    given = {"VLLM_LOGGING_LEVEL": "info", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "KEPT": "before"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}

    with starting():
        inside = dict(os.environ)
        os.environ["KEPT"], os.environ["ADDED"], os.environ["VLLM_OWN"] = "after", "x", "y"
        del os.environ["PYTORCH_ALLOC_CONF"]
    stopped()

    assert inside["VLLM_LOGGING_LEVEL"] == "info"
    assert inside["VLLM_USE_FLASHINFER_SAMPLER"] == inside[IN_PROCESS] == "0"
    assert inside["GLOO_SOCKET_IFNAME"] == "lo"
    assert inside["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ.pop("VLLM_OWN") == "y"
    assert {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} == before


@pytest.mark.parametrize(
    ("given", "initialized", "expected"),
    [
        ({}, False, EXPANDABLE),
        ({}, True, None),  # torch has read it
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, False, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False, None),
    ],
)
def test_segments_expand_unless_the_user_or_cuda_came_first(monkeypatch, given, initialized, expected):
    for name in ALLOCATOR:  # restores what the call sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)

    expand_segments()

    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


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
    monkeypatch.setenv("GRPO_FAST_CACHE", str(first / "config.json"))  # which cannot be written
    assert cached_model_folder(folders[0]) == folders[0]


@pytest.mark.parametrize(
    ("device", "given", "longest", "expected"),
    [
        ("cpu", {}, None, {"enforce_eager": True, "max_model_len": -1}),
        ("cpu", {}, 50, {"max_model_len": 50}),
        ("cuda", {}, None, {"enforce_eager": False, "tensor_parallel_size": 1}),
        ("cuda", {"enforce_eager": True}, None, {"enforce_eager": True}),
        ("cpu", {"max_model_length": 99, "enforce_eager": False}, 50, {"max_model_len": 99}),
        ("cuda", {"max_sequences": 3}, None, {"max_num_seqs": 3, "cudagraph_capture_sizes": [1, 2, 3]}),
        ("cuda", {"tensor_parallel_size": 2}, None, {"tensor_parallel_size": 2}),
    ],
)
def test_vllm_is_started_by_configuration_then_device(device, given, longest, expected):
    arguments = engine_arguments(policy(device), VLLMConfig(**given), False, longest)

    assert expected.items() <= arguments.items()
    assert arguments.get("enable_chunked_prefill") == (False if device == "cpu" else None)
    assert not {"enable_lora", "hf_overrides"} & arguments.keys()


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", {}, {"kv_cache_memory_bytes": GIB // 2}),
        ("cpu", {"kv_cache_gib": 2.0}, {"kv_cache_memory_bytes": GIB}),
        # vLLM measures: in most of what is free where keys and values are bounded, else in a part of it.
        ("cuda", {"kv_cache_gib": 2.0}, {"gpu_memory_utilization": MOST_FREE * 60 / 80}),
        ("cuda", {"kv_cache_gib": 2.0, "gpu_memory_utilization": 0.3}, {"gpu_memory_utilization": 0.3}),
        ("cuda", {}, {"gpu_memory_utilization": 0.5}),
        # In a second start, less of it may be free than configured.
        ("cuda", {"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": MOST_FREE * 60 / 80}),
    ],
)
def test_keys_and_values_have_room_by_configuration_then_device(monkeypatch, device, given, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    found = memory_arguments(VLLMConfig(**given), torch.device(device), shared=20, share=0.5)

    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("said", "shares"), [("out of memory", [1.0, engine.SMALLER]), ("a bug", [1.0])])
def test_out_of_memory_starts_vllm_once_more_with_less_room(monkeypatch, said, shares):
    starts: list[float] = []

    def full(*given: Any) -> None:
        starts.append(given[-1])
        raise RuntimeError(f"CUDA error: {said}")

    monkeypatch.setattr(engine, "start", full)
    with pytest.raises(RuntimeError, match=r"kv_cache_gib.*max_sequences" if len(shares) > 1 else said):
        engine.VLLMEngine(policy("cpu"), VLLMConfig())
    assert starts == shares


@pytest.mark.parametrize("listed", [False, True])  # as before vLLM 0.28, and since
def test_a_failed_start_gives_vllms_pool_back_before_its_allocators(monkeypatch, listed):
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    ended: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            ended.append(self.name)

    pairs = {tag: (Part("pool"), Part("allocator")) for tag in ("weights", "kv_cache")}
    kept = {tag: [pair] if listed else pair for tag, pair in pairs.items()}
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", SimpleNamespace(allocator_and_pools=kept))
    del pairs

    release_pool()

    assert kept == {} and ended == ["pool", "pool", "allocator", "allocator"]


def test_prompts_of_a_hybrid_are_cached_on_a_gpu_alone():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 8}
    config = AutoConfig.for_model("lfm2", **sizes, num_hidden_layers=1, layer_types=["conv"])
    hybrid = AutoModelForCausalLM.from_config(config)
    for device, model, cached in (("cpu", hybrid, False), ("cuda", hybrid, True), ("cpu", None, True)):
        asked = policy(device)
        asked.base_model = model or asked.base_model
        assert engine_arguments(asked, VLLMConfig(), False, None)["enable_prefix_caching"] == cached


def test_graphs_are_captured_up_to_the_largest_batch():
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    for largest in range(2, 1025):
        sizes = graph_sizes(largest)
        assert sizes == sorted(set(sizes)) and sizes[-1] == largest and len(sizes) <= 36
        assert all(b - a <= max(8, largest / 16) for a, b in pairwise(sizes))


def test_a_float32_head_and_ranks_of_lora_are_what_vllm_has(installed):
    def arguments(adapters: bool = True, rank: int = 12) -> dict[str, Any]:
        return engine_arguments(policy("cpu", rank=rank), VLLMConfig(fp32_head=True), adapters, 9)

    installed("0.26.0")
    assert arguments(False)["hf_overrides"] == {"head_dtype": "float32"}
    assert [arguments(rank=rank)["max_lora_rank"] for rank in (8, 12, 16, 512)] == [8, 16, 16, 512]
    with pytest.raises(ValueError, match=r"lora\.r = 600"):
        arguments(rank=600)
    installed("0.25.1")
    with pytest.raises(ValueError, match=r"fp32_head.*0\.25\.1.*0\.26"):
        arguments(False)


@pytest.mark.parametrize(
    ("device", "platform", "ranks", "key"),
    [
        ("cpu", "cuda", 1, r"built for cuda.*model\.device"),
        ("cpu", "", 1, r"finds none.*model\.device"),
        ("cuda:1", "cuda", 1, "CUDA_VISIBLE_DEVICES = 1"),
        ("cpu", "cpu", 1, None),
        ("cuda:1", "cuda", 2, None),
    ],
)
def test_vllm_must_work_where_the_policy_lies(device, platform, ranks, key):
    with pytest.raises(ValueError, match=key) if key else nullcontext():
        require_device(torch.device(device), platform, World(size=ranks))


@pytest.mark.parametrize("processes", [1, 3])
def test_the_processes_that_vllm_joins_are_the_trainers(monkeypatch, processes):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    require_processes(World(size=processes))
    with pytest.raises(ValueError, match=rf"{processes} processes.*size = 2"):
        require_processes(World(size=2))


QLORA = {"rank": 8, "quantized": True}


@pytest.mark.parametrize(
    ("device", "options", "config", "expected"),
    [  # (LoRA as an adapter, shared weights), or the refusal
        ("cuda", {}, {}, (False, True)),
        ("cuda", {}, {"share_weights": False, "sleep_level": 2}, (False, False)),
        ("cuda", {}, {"tensor_parallel_size": 2}, (False, False)),
        ("cuda", {"experts": True}, {"sleep_level": 1}, (False, False)),
        ("cuda", {"rank": 8, "sharded": True}, {}, (False, False)),
        ("cuda", {"rank": 8}, {}, (False, False)),
        ("cuda", {"rank": 8}, {"lora_sync": "adapter"}, (True, True)),
        ("cuda", QLORA, {}, (True, True)),
        ("cuda", QLORA, {"tensor_parallel_size": 2}, (True, False)),
        ("cpu", QLORA, {}, (True, True)),
        ("cpu", QLORA, {"share_weights": False}, (True, False)),
        ("cpu", {"rank": 8}, {"lora_sync": "adapter"}, (True, True)),
        ("cpu", {}, {}, (False, True)),
        ("cuda", {"rank": 8}, {"share_weights": True}, "share_weights = true.*lora_sync"),
        ("cuda", {}, {"share_weights": True, "tensor_parallel_size": 4}, "tensor_parallel_size = 4"),
        ("cuda", {"experts": True}, {"share_weights": True}, "share_weights = true.*experts"),
        ("cuda", {}, {"lora_sync": "merged"}, "lora_sync = 'merged'"),
        ("cuda", {"sharded": True}, {"share_weights": True}, "share_weights = true.*'shard'"),
        ("cuda", {"rank": 8, "sharded": True}, {"lora_sync": "adapter"}, "'adapter'.*'shard'.*replicate"),
        ("cpu", {}, {"sleep_level": 1}, "sleep_level = 1 needs a GPU"),
        ("cpu", {"experts": True}, {}, "on a CPU vLLM packs experts.*set it to transformers"),
        ("cuda", {"rank": 8}, {"lora_sync": "adapter", "sleep_level": 2}, "sleep_level = 2 drops.*merged"),
        ("cuda", QLORA, {"sleep_level": 2}, "sleep_level = 2 drops.* to 1$"),
        ("cuda", QLORA, {"lora_sync": "merged"}, "'merged'.* 4-bit.*at auto"),
    ],
)
def test_adapters_and_sharing_follow_policy_and_configuration(device, options, config, expected):
    refused = pytest.raises(ValueError, match=expected) if isinstance(expected, str) else nullcontext()
    with refused:
        weights = choose(policy(device, **options), VLLMConfig(**config))
        assert (weights.adapters, weights.shared) == expected
