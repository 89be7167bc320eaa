"""`rollout.router_replay` in whole runs: the sampler's experts reach the update, or a refusal."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data.table import EXPERTS, UNKNOWN
from grpo_fast.record.logs import Clock
from grpo_fast.rollout import require_engine
from grpo_fast.run import build_trainer

CHOICES = 2  # of 4 experts
SIZES = {
    **{"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3},
    **{"num_experts": 4, "num_experts_per_tok": CHOICES},
}


@pytest.fixture
def with_experts(tmp_path, seed):
    """A configuration whose model is a mixture of experts with the same tokenizer."""

    def change(toy: dict) -> dict:
        torch.manual_seed(seed)
        before = AutoConfig.from_pretrained(toy["model"]["path"])
        tokens = {
            n: getattr(before, n) for n in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        }
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **tokens)).save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(toy["model"]["path"]).save_pretrained(tmp_path / "model")
        rollout = {**toy["rollout"], "router_replay": True}
        return {**toy, "model": {**toy["model"], "path": str(tmp_path / "model")}, "rollout": rollout}

    return change


@pytest.mark.parametrize("kind", ["toy", "playing_toy"])
def test_an_update_replays_the_experts_of_one_turn_or_several(kind, request, with_experts):
    config = with_experts(request.getfixturevalue(kind)) | {
        "num_iterations": 2,
        "advantage": {"skip_flat_groups": False},
    }
    trainer = build_trainer(TrainConfig(**config))
    table, _ = trainer.collect(Clock())
    experts = table.inputs[EXPERTS]
    last = len(table.prompt_ids) + table.offsets[1:] - 1
    read = torch.ones(len(experts), dtype=torch.bool)
    read[last] = False
    assert experts.shape == (len(table.prompt_ids) + len(table.token_ids), 2, CHOICES)
    assert ((experts[read] >= 0) & (experts[read] < 4)).all()
    assert (experts[last] == UNKNOWN).all()

    metrics = trainer.train_step().metrics

    # The router is the one that drew in the first of two steps, and has moved a little in the second.
    assert 0 <= metrics["sampling/experts_differ_mean"] < 0.2
    assert metrics["sampling/logp_difference_max"] < 1e-4


def test_a_custom_rollout_that_loses_the_experts_ends_the_run(toy, with_experts, tmp_path):
    (tmp_path / "own.py").write_text(
        "import dataclasses\n"
        "def rollout(engine, prompts, sampling):\n"
        "    groups = [engine.generate([p.token_ids], 1, sampling)[0] for p in prompts]\n"
        "    return [dataclasses.replace(group[0], experts=None) for group in groups]\n"
    )
    config = with_experts(toy)
    config["rollout"]["function"] = f"{tmp_path / 'own.py'}:rollout"
    with pytest.raises(ValueError, match="router_replay = true, and the rollout's completions do not tell"):
        build_trainer(TrainConfig(**config)).train_step()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"compile": True}}, "compiled layers do not record: set model.compile to false"),
        ({"dataset": {"source": "verifiers:gsm8k"}}, "which `verifiers:` does not return"),
        (
            {"stages": [{"name": "a", "overrides": {"rollout": {"router_replay": False}}}]},
            "one for all stages",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_configuration(toy, with_experts, changes, said):
    config = with_experts(toy)
    merged = {n: {**config[n], **v} if isinstance(v, dict) else v for n, v in changes.items()}
    with pytest.raises(ValueError, match=said):
        build_trainer(TrainConfig(**config | merged))


def test_a_dense_or_padded_model_is_refused_before_weights_are_read(toy, with_experts, monkeypatch):
    monkeypatch.setattr("grpo_fast.run.build.load_policy", lambda *_, **__: pytest.fail("weights are read"))
    config, replay = with_experts(toy), {"rollout": {**toy["rollout"], "router_replay": True}}
    with pytest.raises(ValueError, match=r"router_replay = true .* 'llama': it has no experts, so no router"):
        build_trainer(TrainConfig(**toy | replay))
    config["model"]["packing"] = "none"
    with pytest.raises(ValueError, match=r"'qwen3_moe': model\.packing = none; leave it out"):
        build_trainer(TrainConfig(**config))


@pytest.mark.parametrize(
    ("engine", "installed", "said"),
    [
        ("vllm", ("vllm", "0.31.0"), r"vLLM 0\.31\.0 is not supported: pip install 'vllm>=0\.32"),
        ("vllm", ("vllm", "0.32.0+cpu"), "its build for a CPU does not have"),
        ("transformers", None, "engine 'transformers' does not return routed experts"),
    ],
)
def test_an_engine_without_experts_is_refused_before_loading(monkeypatch, engine, installed, said):
    monkeypatch.setattr("grpo_fast.rollout.vllm._installed", lambda: installed)
    monkeypatch.setattr("grpo_fast.rollout.engines.TransformersKind.tells_experts", False)
    with pytest.raises(ValueError, match=said):
        require_engine(RolloutConfig(engine=engine, router_replay=True))
