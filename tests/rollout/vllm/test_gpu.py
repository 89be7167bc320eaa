"""vLLM and the trainer on one GPU: memory and weights in every way that weights are sent.

vLLM's memory pool is empty only once in a process, so each case runs this file as a script.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_fast.config.policy import LoraConfig, ModelConfig
from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.policy import Policy, load_policy
from grpo_fast.rollout import Sampling

SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), tuple(3 + i % 26 for i in range(140))]
CYCLES, MANY = 3, 200
MIB = 2**20
EAGER = {"enforce_eager": True}
# Settings, whether there is LoRA, the way of the weights and the sleep level they lead to, and other levels.
CASES: dict[str, tuple[dict[str, Any], bool, str, tuple[int, ...]]] = {
    "shared": (EAGER, False, "shared", (1, 0)),
    "copied": (EAGER | {"share_weights": False}, False, "direct", (2, 1, 0)),
    "merged": (EAGER, True, "direct", (2, 1, 0)),
    "adapter": (EAGER | {"lora_sync": "adapter"}, True, "adapter", (1, 0)),
    "without sleep": (EAGER | {"sleep_level": 0, "share_weights": True}, False, "shared", (0,)),
    "graphs on shared weights": ({"max_sequences": 6}, False, "shared", (1, 0)),
    "graphs on copied weights": ({"share_weights": False}, False, "direct", (2, 1, 0)),
    "4 bits": (EAGER, True, "adapter", (1, 0)),
    "graphs on 4 bits": ({"max_sequences": 6}, True, "adapter", (1, 0)),
}
ENDURING = ("shared", "copied")


@pytest.mark.gpu
@pytest.mark.timeout(600)  # compiling for the graphs included
@pytest.mark.parametrize("name", CASES)
def test_cycles_give_the_memory_back_and_keep_sampler_and_policy_together(name, saved_model):
    if "4 bits" in name:
        pytest.importorskip("bitsandbytes")
    in_a_process_of_its_own(name, str(saved_model()))


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["shared", "merged", "4 bits"])
def test_a_model_of_billions_starts_without_a_second_copy(name, toy, tmp_path):
    if name == "4 bits":
        pytest.importorskip("bitsandbytes")
    in_a_process_of_its_own(name, str(save_llama(toy, tmp_path / "model", layers=24)), "large")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_run_starts_and_resumes_where_engine_and_optimizer_do_not_both_fit(
    toy: dict[str, Any], tmp_path: Path
) -> None:
    model = save_llama(toy, tmp_path / "model", layers=8)  # 0.5 billion parameters
    run = {**toy, "max_steps": 2, "output_dir": str(tmp_path / "run"), "evaluation": {}}
    run["model"] = {"path": str(model), "dtype": "bfloat16", "device": "cuda"}
    run["rollout"] = {**toy["rollout"], "engine": "vllm", "vllm": EAGER | {"kv_cache_gib": 8}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    for resume in ("", "latest"):
        in_a_process_of_its_own("pressed", str(tmp_path / "run.json"), resume)


def save_llama(toy: dict[str, Any], folder: Path, layers: int) -> Path:
    """Write a model of 63 million parameters a layer, in bfloat16."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = AutoConfig.from_pretrained(toy["model"]["path"], **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy["model"]["path"]).save_pretrained(folder)
    return folder


def in_a_process_of_its_own(*arguments: str) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, __file__, *arguments]
    case = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert case.returncode == 0, case.stdout + case.stderr


def pressed(config: str, resume: str) -> None:
    """Steps within 12 GiB: 8 of keys and values, 0.9 of weights, 7.5 of masters, gradients and moments."""
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.run import train

    held = torch.empty(torch.cuda.mem_get_info()[0] - 12 * 2**30, dtype=torch.uint8, device="cuda")
    settings = json.loads(Path(config).read_text())
    settings["max_steps"] += bool(resume)
    train(TrainConfig(**settings), resume=resume or None, display=False)
    del held


def update(policy: Policy, rate: float) -> None:
    """A backward pass through the weights as they are, and a step: shared ones must bear both."""
    ids = torch.randint(3, 29, (4, 64), device=policy.device)
    policy.model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in policy.trainable().values():
            assert parameter.grad is not None and parameter.grad.isfinite().all()
            parameter -= rate * parameter.grad.sign()
            parameter.grad = None


def cycles(name: str, folder: Path, difference: Callable[..., float], *, large: bool = False) -> None:
    from grpo_fast.rollout.vllm.engine import VLLMEngine

    settings, with_lora, way, levels = CASES[name]
    lora = LoraConfig(r=8) if with_lora else None
    base = {"path": str(folder), "dtype": "bfloat16", "quantization": "nf4" if "4 bits" in name else None}
    policy = load_policy(ModelConfig(**base, device="cuda", lora=lora))
    config = VLLMConfig(kv_cache_gib=1.0, **settings)
    weights = sum(weight.nbytes for weight in policy.base_weights().values())
    torch.cuda.reset_peak_memory_stats()
    with VLLMEngine(policy, config, max_length=256) as engine:
        assert (engine._sync.way, engine._cycle.level) == (way, levels[0]), engine._sync.reason
        if large and way == "shared":
            assert torch.cuda.max_memory_allocated() < 1.5 * weights
        if "max_sequences" in settings:
            assert engine._vllm.vllm_config.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 6]
        enduring = [(levels[0], MANY, 0.002)] if name in ENDURING and not large else []
        for level, count, rate in [*((level, CYCLES, 0.02) for level in levels), *enduring]:
            engine._cycle.level = level
            asleep = []
            for _ in range(count):
                engine.generate(PROMPTS, 3, replace(SAMPLING, logprobs=False))
                awake = torch.cuda.mem_get_info()[0]
                engine.sleep()
                asleep.append(torch.cuda.mem_get_info()[0])
                freed = asleep[-1] - awake
                assert freed > 900 * MIB if level else freed == 0  # the KV cache at least
                update(policy, rate)
                engine.sync(policy)
                engine.wake()
                groups = engine.generate(PROMPTS, 3, SAMPLING)
                assert difference(policy, PROMPTS, groups) < 0.3
            assert asleep[0] - asleep[-1] < 64 * MIB  # nothing piles up
        engine.sleep()  # closed while sleeping, as by an interrupted run


if __name__ == "__main__":
    case, *rest = sys.argv[1:]
    if case == "pressed":
        pressed(*rest)
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from conftest import largest_difference

        cycles(case, Path(rest[0]), largest_difference, large="large" in rest)
