"""Scripts of TRL and Unsloth: the same arguments, loaded models, TRL's defaults, and what is refused."""

from __future__ import annotations

import json
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import grpo_fast
from grpo_fast.cli import main
from grpo_fast.config.keys import ConfigError
from grpo_fast.config.load import load_config
from grpo_fast.rewards.types import RewardError
from grpo_fast.run.arguments import trl_places
from grpo_fast.run.loader import Loader, with_steps

OURS: dict[str, Any] = {"output_dir": "out", "use_cpu": True, "max_steps": 2, "learning_rate": 1e-2}
OURS |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
OURS |= {"max_completion_length": 8, "report_to": "none"}


def near_w7(prompts, completions, completion_ids, trainer_state, start, **columns: Any) -> list[float]:
    """TRL's contract; prompts and completions are conversations or text, together."""
    assert trainer_state.max_steps and len(start) == len(completion_ids)
    assert {type(prompt) for prompt in prompts} == {type(done) for done in completions}
    texts = [done if isinstance(done, str) else done[0]["content"] for done in completions]
    return [float(text.count("w7")) for text in texts]


@pytest.fixture
def script(toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a TRL script, run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in Path(toy["dataset"]["source"]).read_text().splitlines()]
    data = Dataset.from_list([row | {"start": index} for index, row in enumerate(rows)])
    given = {"model": toy["model"]["path"], "reward_funcs": near_w7, "train_dataset": data, "display": False}
    return given | {"args": grpo_fast.GRPOConfig(**OURS), "dtype": "float32"}


def loaded(script: dict[str, Any]) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(script["model"], dtype=torch.float32)
    own = {"model": model, "processing_class": AutoTokenizer.from_pretrained(script["model"])}
    return {key: value for key, value in script.items() if key != "dtype"} | own


def test_a_script_of_trl_trains_a_loaded_model_and_resumes(script):
    trl = pytest.importorskip("trl")
    call = loaded(script) | {"args": trl.GRPOConfig(**OURS, bf16=False), "eval_dataset": [{"prompt": "w2"}]}
    call["eval_dataset"] = Dataset.from_list([{"prompt": "w2", "start": 0}])
    with torch.no_grad():
        call["model"].model.norm.weight.mul_(2)
    start = {name: weight.clone() for name, weight in call["model"].state_dict().items()}

    run = grpo_fast.train(**call)

    assert run.folder.samefile("out") and run.config.model.path == str(Path("out/inputs/model").absolute())
    assert run.config.dataset.chat == run.config.evaluation.dataset.chat == "messages"
    kept, trained = AutoModelForCausalLM.from_pretrained("out/inputs/model").state_dict(), run.policy.model
    for name, weight in call["model"].state_dict().items():
        assert torch.equal(kept[name], start[name]) and torch.equal(weight, trained.state_dict()[name])
    assert not torch.equal(kept["lm_head.weight"], trained.lm_head.weight)
    Path("out").rename("moved")
    assert main(["train", "moved", "--resume", "max_steps=3"]) == 1  # whose rewards only the call has
    again = grpo_fast.train(
        **call | {"args": trl.GRPOConfig(**OURS | {"max_steps": 3, "output_dir": "moved"})},
        resume=True,
        **{"optimizer.schedule": "linear"},
    )
    assert list(again.metrics.index) == [0, 1, 2, 3]
    assert again.config.model.path == str(Path("moved/inputs/model").absolute())


def test_a_default_grpo_config_gives_the_values_of_trl(script):
    trl = pytest.importorskip("trl")
    theirs = trl.GRPOConfig(use_cpu=True)
    places = trl_places(theirs, {"reward_funcs": ["length"]}) | {"model.path": "m", "dataset.source": "d"}
    ours = load_config(places).model_dump()

    for place, name in {
        **{"loss.loss_type": "loss_type", "loss.beta": "beta", "loss.epsilon_low": "epsilon", "seed": "seed"},
        **{"optimizer.learning_rate": "learning_rate", "optimizer.weight_decay": "weight_decay"},
        **{"optimizer.max_grad_norm": "max_grad_norm", "optimizer.schedule": "lr_scheduler_type"},
        **{"rollout.num_generations": "num_generations", "rollout.temperature": "temperature"},
        **{"rollout.max_completion_length": "max_completion_length", "rollout.top_p": "top_p"},
        **{"rollout.top_k": "top_k", "epochs": "num_train_epochs", "num_iterations": "num_iterations"},
        **{"advantage.scale_rewards": "scale_rewards", "output_dir": "output_dir"},
        **{"advantage.mask_truncated": "mask_truncated_completions", "checkpoint.every": "save_steps"},
    }.items():
        value: Any = ours
        for part in place.split("."):
            value = value[part]
        assert value == getattr(theirs, name), place
    assert (
        ours["optimizer"]["betas"] == (theirs.adam_beta1, theirs.adam_beta2) and ours["prompts_per_step"] == 1
    )


@pytest.mark.parametrize(
    ("sizes", "processes", "prompts", "minibatches"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, 1, 2, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, 2, 4, 1),
        ({"per_device_train_batch_size": 8, "steps_per_generation": 4}, 2, 8, 4),
        ({"per_device_train_batch_size": 8, "generation_batch_size": 64}, 2, 8, 4),
        ({"per_device_train_batch_size": 1}, 1, 1, 1),  # as Unsloth does
    ],
)
def test_prompts_of_a_step_follow_from_batch_accumulation_and_processes(
    monkeypatch, sizes, processes, prompts, minibatches
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    places = trl_places({"num_generations": 8, **sizes}, {"reward_funcs": ["length"]})
    assert (places["prompts_per_step"], places["minibatches"]) == (prompts, minibatches)


def test_a_script_of_unsloth_trains_adapters_and_saves_them(script, tmp_path, caplog):
    model, tokenizer = grpo_fast.FastLanguageModel.from_pretrained(script["model"], max_seq_length=64)
    model = grpo_fast.FastLanguageModel.get_peft_model(
        model, r=4, target_modules=["q_proj"], lora_alpha=8, use_gradient_checkpointing=True, random_state=1
    )
    rows = script["train_dataset"].to_list()
    stream = IterableDataset.from_generator(lambda: cycle(rows))
    trainer = grpo_fast.GRPOTrainer(
        **script | {"model": model, "train_dataset": stream, "processing_class": tokenizer}
    )

    run = trainer.train()

    trainer.save_model("adapter")
    base = AutoModelForCausalLM.from_pretrained(script["model"])
    prompt = torch.tensor([[3, 4, 5]])
    adapted = PeftModel.from_pretrained(base, "adapter")(prompt).logits
    assert torch.allclose(adapted, trainer.model(prompt).logits, atol=1e-5)
    assert "max_seq_length" in caplog.text and run.config.model.lora.target_modules == ["q_proj"]
    assert main(["export", str(run.folder), "exported", "--adapter"]) == 0
    assert (
        Path("exported/adapter_model.safetensors").read_bytes()
        == Path("adapter/adapter_model.safetensors").read_bytes()
    )
    assert main(["export", str(run.folder), "model.gguf"]) == 1


def test_adapters_of_a_loaded_peft_model_are_trained_in_place(script):
    call = loaded(script)
    lora = LoraConfig(r=4, lora_alpha=8, use_rslora=True, task_type="CAUSAL_LM")
    call["model"] = get_peft_model(call["model"], lora)

    run = grpo_fast.train(**call)

    found = run.config.model.lora
    assert (found.r, found.alpha, found.target_modules) == (4, 16.0, ["q_proj", "v_proj"])
    prompt = torch.tensor([[3, 4, 5]])
    assert torch.allclose(call["model"](prompt).logits, run.policy.model(prompt).logits, atol=1e-5)
    with pytest.raises(ConfigError, match=r"has trained adapters, .* or give model.merge_and_unload\(\)"):
        grpo_fast.train(**call)


@pytest.mark.parametrize(
    ("rows", "settings", "templated"),
    [
        ([{"prompt": "w2"}], {}, False),
        ([{"q": "2"}], {"prompt_template": "w{q}"}, False),
        ([{"prompt": [{"role": "user", "content": "w2"}]}], {}, True),
        ([{"prompt": "w2"}], {"system_prompt": "w4"}, True),
        ([{"prompt": "w2"}], {"chat": True}, True),
    ],
)
@pytest.mark.parametrize("saved", [False, True])
def test_the_model_gets_text_as_it_is_wherever_rows_are(
    playing_toy, tmp_path, rows, settings, templated, saved
):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    if saved:
        source = tmp_path / "saved"
        Dataset.from_list(rows).save_to_disk(source)
    ours = {"model.path": playing_toy["model"]["path"], "dataset": {"source": str(source), **settings}}
    config = load_config(trl_places({}, {"reward_funcs": ["length"]}), ours)

    loader = Loader(config)
    (prompt,) = loader.training(config)[1]

    assert (loader.tokenizer.decode(prompt.token_ids) != "w2") == templated


def test_a_warmup_is_a_share_of_the_steps_that_epochs_make(script):
    script["train_dataset"].to_json("rows.jsonl")
    given = {"warmup_ratio": 0.25, "num_train_epochs": 2, "per_device_train_batch_size": 16}
    given |= {"generation_batch_size": None, "model_init_kwargs": {"torch_dtype": torch.bfloat16}}
    ours = {"model.path": script["model"], "dataset.source": "rows.jsonl"}

    config = with_steps(load_config(trl_places(given, {"reward_funcs": ["length"]}), ours))

    assert config.max_steps == len(script["train_dataset"]) and config.model.dtype == "bfloat16"
    assert config.optimizer.warmup_steps == ceil(0.25 * config.max_steps)


def test_options_without_effect_are_named_but_not_those_left_unset(caplog):
    loading = {
        "attn_implementation": "kernels-community/flash-attn2",
        "device_map": "auto",
        "use_cache": False,
    }
    given = {"model_init_kwargs": loading, "generation_batch_size": None, "ddp_backend": None}
    places = trl_places(given, {"reward_funcs": ["length"]})
    assert places["model.attention"] == "flash_attention_2"
    assert "device_map: a run places" in caplog.text and "None" not in caplog.text


def test_a_call_trains_its_own_model_after_one_that_failed(script):
    def asks(completions, no_column, **columns: Any) -> list[float]:
        return [0.0 for _ in completions]

    def kept() -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained("out/inputs/model").model.norm.weight

    def scaled(factor: float) -> dict[str, Any]:
        call = loaded(script)
        with torch.no_grad():
            call["model"].model.norm.weight.mul_(factor)
        return call

    with pytest.raises(RewardError, match="no_column"):
        grpo_fast.train(**scaled(3) | {"reward_funcs": asks})
    Path("out/inputs/model").mkdir(parents=True)  # as after a kill
    Path("out/inputs/model.tmp").mkdir()
    Path("out/inputs/model.tmp/model.safetensors").write_text("torn")
    grpo_fast.train(**(call := scaled(5)))
    assert torch.allclose(kept(), torch.tensor(5.0)) and call["model"].model.norm.weight.mean() > 4
    with pytest.raises(RewardError, match="no_column"):
        grpo_fast.train(**scaled(7) | {"reward_funcs": asks}, overwrite=True)
    assert torch.allclose(kept(), torch.tensor(5.0)) and len(grpo_fast.Run("out").metrics) == 3
    grpo_fast.train(**scaled(7), overwrite=True, max_steps=1)
    assert torch.allclose(kept(), torch.tensor(7.0)) and len(grpo_fast.Run("out").metrics) == 2
    assert [path.name for path in Path("out/inputs").iterdir()] == ["model"]


class Watches(TrainerCallback):
    pass


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"callbacks": [Watches()]}, "callbacks: has transformers' TrainerCallback Watches: derive from"),
        ({"callbacks": [Watches]}, "callbacks: has transformers' TrainerCallback Watches: derive from"),
        ({"reward_funcs": [torch.nn.Linear(1, 1)]}, "has a model, Linear; rewards here are functions"),
        ({"reward_funcs": ["org/model"]}, "reward_funcs.*org/model is a reward model"),
        ({"reward_funcs": [{"reward": near_w7, "weight": 2}]}, "functions and reward_weights"),
        ({"reward_processing_classes": [1]}, r"reward_processing_classes = \[1\]: rewards are functions"),
        ({"optimizers": (torch.optim.AdamW, None)}, "optimizers.*: the optimizer and its schedule"),
        ({"rollout_func": near_w7}, "rollout_func"),
        ({"peft_config": LoraConfig(bias="all")}, "peft_config.bias = 'all': has no equivalent"),
        ({"args": {"sync_ref_model": True, "foo": 3}}, r"sync_ref_model(.|\n)*args\.foo = 3: is not a key"),
        ({"args": {"entropy_target": 0.3}}, "args.entropy_target = 0.3"),
        ({"args": {"per_device_train_batch_size": "4"}}, "args.per_device_train_batch_size = '4'"),
        ({"args": {"per_device_train_batch_size": 12}}, "args.per_device_train_batch_size = 12.*not divide"),
        ({"args": 3}, "args: is a int; give a GRPOConfig"),
        ({"config": "quickstart"}, "config = 'quickstart': goes without TRL's args"),
        ({"dataset": [{"prompt": "w2"}]}, "dataset: is given twice"),
        ({"eval_dataset": {"a": [], "b": []}}, "evaluation.dataset: is several splits: give one of 'a', 'b'"),
        (
            {"train_dataset": IterableDataset.from_generator(list), "args": {}},
            "set max_steps, or dataset.size",
        ),
        ({"model": torch.nn.Linear(1, 1)}, "model: is a Linear: give a folder, a hub id or a loaded model"),
    ],
)
def test_what_a_run_cannot_take_of_trl_is_refused_by_name(script, changes: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        grpo_fast.train(**script | changes)
    assert not Path("out").exists()


def test_a_folder_of_save_to_disk_is_read_by_its_split(script, capsys):
    script.pop("train_dataset").save_to_disk("saved")
    run = grpo_fast.train(**script, train_dataset="saved", max_steps=1)
    assert list(run.metrics.index) == [0, 1]
    with pytest.raises(ValueError, match="there are train"):
        grpo_fast.train(**script, train_dataset={"source": "saved", "split": "test"})
