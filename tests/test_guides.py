"""What the five guides show, done here: for each of their blocks a case on two steps of a tiny model.

`docs/guides.md` is the table of the guides' sections and of these tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import yaml
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import grpo_fast
from grpo_fast.cli import main
from grpo_fast.config.load import load_config
from grpo_fast.config.tree import flatten
from grpo_fast.objective import PairScores
from grpo_fast.record.files import read_jsonl
from grpo_fast.rollout import Completion
from grpo_fast.run.arguments import trl_places
from tests.conftest import save_llama, word_tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
NUMBERS = [str(number) for number in range(20)]
TALK = "system user assistant work step by ends plus is so it cats dogs"
WORDS = ["<unk>", "</s>", *TAGS, *TALK.split(), *NUMBERS]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
SYSTEM = "work step by step"
WHOLE = "<think> so it is </think> <answer> 7 </answer>"
DRAFTS = ["7", "<think> 7", "<think> so </think>", "<think> so </think> <answer> 7", WHOLE, f"{WHOLE} so"]
"""Completions with none to four tags, and one that goes on after the last."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model that talks in turns, with a token for each tag."""
    folder = tmp_path_factory.mktemp("guides") / "model"
    tokenizer = word_tokenizer(WORDS, "</s>")
    tokenizer.chat_template = TEMPLATE
    save_llama(folder, tokenizer, num_key_value_heads=2, tie_word_embeddings=True)
    return str(folder)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(model: Any, **changes: Any) -> grpo_fast.Run:
    """Two steps on four prompts, without anything on the terminal."""
    rows = [{"prompt": f"{i} plus {7 - i}", "solution": "7"} for i in range(4)]
    small = {"model": {"path": model, "dtype": "float32", "device": "cpu"}, "output_dir": "out"}
    small |= {"max_steps": 2, "prompts_per_step": 2, "learning_rate": 1e-2, "display": False}
    small |= {"logging": {"tensorboard": False, "samples_every": 1, "samples": 100}}
    if changes.get("algorithm", "grpo") == "grpo":
        small |= {"dataset": rows, "rewards": is_seven, "num_generations": 6, "max_completion_length": 12}
    return grpo_fast.train(**small | changes)


def says(*texts: str) -> Callable[..., list[Completion]]:
    """Return a rollout that answers every prompt with these texts, one after the other."""

    def rollout(engine: Any, prompts: Sequence[Any], sampling: Any) -> list[Completion]:
        made = []
        for place in range(len(prompts)):
            text = texts[place % len(texts)]
            ids = (*map(WORDS.index, text.split()), 1)
            made.append(Completion(ids, (-3.7,) * len(ids), text, truncated=False))
        return made

    return rollout


def samples(run: grpo_fast.Run, step: int) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(run.folder / "samples.jsonl") if record["step"] == step]


def logprob(policy: Any, question: str, answer: str) -> float:
    """Of an answer after a question, summed over its tokens."""
    ids = [*policy.tokenizer(question)["input_ids"], *policy.tokenizer(answer)["input_ids"]]
    with torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    length = len(answer.split())
    return sum(logits[place - 1, ids[place]].item() for place in range(len(ids) - length, len(ids)))


# ------------------------------------------------------------------ rewards, as TRL and Axolotl call them


def content(completions: Sequence[Any]) -> list[str]:
    return [said if isinstance(said, str) else said[-1]["content"] for said in completions]


def is_seven(prompts, completions, solution=None, **columns) -> list[float]:
    """2 where the last number is the solution."""
    found = [re.findall(r"\d+", text)[-1:] for text in content(completions)]
    return [2.0 if number == [right] else 0.0 for number, right in zip(found, solution, strict=True)]


def in_blocks(completions, **columns) -> list[float]:
    form = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
    return [float(form.search(text) is not None) for text in content(completions)]


def tags_so_far(completions, **columns) -> list[float]:
    """A quarter for each tag, and a little less for each character after the last."""
    after = [
        len(text.rpartition("</answer>")[2].strip()) if TAGS[3] in text else 0
        for text in content(completions)
    ]
    found = [sum(tag in text for tag in TAGS) for text in content(completions)]
    return [0.25 * tags - 0.001 * rest for tags, rest in zip(found, after, strict=True)]


# -------------------------------------------------------------------------------------- the guide to TRL


def test_partial_credit_orders_drafts_and_raises_the_best(model):
    """004: rewards by template, correctness, format, incremental format; the mathematical intuition."""
    rewards = [tags_so_far, in_blocks, is_seven]
    run = train(model, rewards=rewards, rollout={"function": says(*DRAFTS)})

    first = samples(run, 1)[: len(DRAFTS)]
    assert [s["rewards"]["tags_so_far"] for s in first] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1 - 0.002])
    assert [s["rewards"]["in_blocks"] for s in first] == [0, 0, 0, 0, 1, 1]
    assert [s["rewards"]["is_seven"] for s in first] == [2, 2, 0, 2, 2, 2]
    assert [s["reward"] for s in first] == pytest.approx([2, 2.25, 0.5, 2.75, 4, 3.998])
    advantages = [s["advantage"] for s in first]
    assert sum(advantages) == pytest.approx(0, abs=1e-4) and max(advantages) == advantages[4]
    before, question = AutoModelForCausalLM.from_pretrained(model), first[0]["prompt"]
    start = type("Start", (), {"model": before, "tokenizer": run.policy.tokenizer})
    gain = {text: logprob(run.policy, question, text) - logprob(start, question, text) for text in DRAFTS}
    assert gain[DRAFTS[4]] > max(0, gain[DRAFTS[2]])  # against the worst


SCRIPT = {"learning_rate": 5e-6, "adam_beta1": 0.9, "adam_beta2": 0.99, "weight_decay": 0.1}
SCRIPT |= {"warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "per_device_train_batch_size": 1}
SCRIPT |= {"gradient_accumulation_steps": 4, "num_generations": 8, "max_prompt_length": 256}
SCRIPT |= {"max_completion_length": 512, "num_train_epochs": 1, "max_steps": None, "bf16": True}
SCRIPT |= {"optim": "adamw_8bit", "max_grad_norm": 0.1, "logging_steps": 1, "save_steps": 100}
LARGE = {"learning_rate": 1e-5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
LARGE |= {"num_generations": 16, "max_prompt_length": 512, "max_completion_length": 1024, "use_vllm": True}
SMALL = {"max_completion_length": 12, "max_steps": 2, "bf16": False, "use_cpu": True, "optim": "adamw_torch"}
SMALL |= {
    "learning_rate": 1e-2,
    "warmup_ratio": 0.0,
    "beta": 0.04,
    "output_dir": "out",
    "report_to": "none",
    "loss_type": "grpo",
}
QUESTIONS = [{"question": f"{i} plus {7 - i}", "raw_answer": f"so it is #### {7}"} for i in range(8)]
ADAPTERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_turns(row: dict[str, str]) -> dict[str, Any]:
    """The function of a `dataset.map`."""
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": turns, "solution": row["raw_answer"].rpartition("####")[2].strip()}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        pytest.param(
            {**SCRIPT, "report_to": "wandb"},
            {
                **{"optimizer.kind": "adamw_8bit", "optimizer.betas": (0.9, 0.99), "epochs": 1},
                **{"optimizer.schedule": "cosine", "optimizer.warmup_steps": 0.1, "logging.wandb": True},
                **{"prompts_per_step": 1, "model.dtype": "bfloat16", "optimizer.max_grad_norm": 0.1},
                **{"rollout.num_generations": 8, "dataset.max_prompt_length": 256, "checkpoint.every": 100},
            },
            id="memory-optimized",
        ),
        pytest.param(
            {**LARGE, "logging_steps": 10, "num_train_epochs": 1, "bf16": True},
            {
                **{"rollout.engine": "vllm", "rollout.num_generations": 16, "prompts_per_step": 1},
                **{"rollout.max_completion_length": 1024, "logging.every": 10, "epochs": 1},
            },
            id="high-performance",
        ),
    ],
)
def test_a_training_configuration_of_trl_keeps_its_values(args, expected):
    places = trl_places(grpo_fast.GRPOConfig("out", **args), {"reward_funcs": ["length"]})
    found = load_config(places | {"model.path": "m", "dataset.source": "d"}).model_dump()
    for place, value in expected.items():
        here: Any = found
        for part in place.split("."):
            here = here[part]
        assert here == value, place


@pytest.fixture(scope="module")
def script(model: str, tmp_path_factory: pytest.TempPathFactory) -> grpo_fast.GRPOTrainer:
    """The guide's script: mapped data, three rewards, LoRA on a loaded model, saved and merged."""
    from peft import LoraConfig

    folder = tmp_path_factory.mktemp("script")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = tokenizer.eos_token
        trainer = grpo_fast.GRPOTrainer(
            model=loaded,
            processing_class=tokenizer,
            reward_funcs=[tags_so_far, in_blocks, is_seven],
            args=grpo_fast.GRPOConfig(**SCRIPT | SMALL),
            train_dataset=Dataset.from_list(QUESTIONS).map(with_turns),
            peft_config=LoraConfig(
                r=16, lora_alpha=32, target_modules=ADAPTERS, task_type="CAUSAL_LM", lora_dropout=0.05
            ),
            display=False,
            **{"logging.samples_every": 1},
        )
        trainer.train()
        trainer.save_model(folder / "final")
        trainer.model.merge_and_unload().save_pretrained(folder / "merged")
        tokenizer.save_pretrained(folder / "merged")
        assert main(["export", str(trainer.run.folder), str(folder / "exported")]) == 0
    return trainer


def test_a_script_trains_adapters_on_mapped_conversations(script):
    """004: dataset preparation, standard setup, reward tracking, the loss's behavior; 003: monitoring."""
    run, first = script.run, samples(script.run, 1)[0]
    assert re.fullmatch(rf"system {SYSTEM} user \d plus \d assistant ?", first["prompt"])
    kept = run.metrics.loc[1:]
    parts = kept[[f"reward/{name}/mean" for name in ("tags_so_far", "in_blocks", "is_seven")]]
    assert kept["reward/mean"].tolist() == pytest.approx(parts.sum(axis=1).tolist(), abs=1e-6)
    assert (kept["reward/std"] > 0).any() and kept["completion/truncated"].between(0, 1).all()
    assert abs(kept["kl"][1]) < 1e-6 < kept["kl"][2] and "clip_ratio/region_mean" in kept
    assert (
        abs(kept["loss"][1]) < 1e-6 < kept["loss"][2] < kept["kl"][2]
    )  # of one update it is beta times the KL
    assert (kept["memory/peak_bytes"] > 0).all()


def test_merged_adapters_load_in_transformers_and_answer_a_conversation(script):
    """004: saving and merging LoRA, inference; memory of adapters."""
    folder = script.run.folder.parent
    ids, start = (
        torch.tensor([[20, 21, 22]]),
        AutoModelForCausalLM.from_pretrained(folder / "out/inputs/model"),
    )
    trained = script.run.policy.model(ids).logits
    for name in ("merged", "exported"):
        merged = AutoModelForCausalLM.from_pretrained(folder / name)
        assert torch.allclose(merged(ids).logits, trained, atol=1e-4)
        assert not torch.allclose(trained, start(ids).logits, atol=1e-3)
    assert (folder / "final/adapter_model.safetensors").is_file()
    answers = pipeline("text-generation", model=str(folder / "merged"))
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "15 plus 2"}]
    said = answers(turns, max_new_tokens=4, do_sample=True, temperature=0.7, top_p=0.9)
    assert said[0]["generated_text"][-1]["role"] == "assistant" and said[0]["generated_text"][-1]["content"]


def test_a_script_of_unsloth_trains_four_bit_weights(model):
    """004: the Unsloth setup."""
    loaded, tokenizer = grpo_fast.FastLanguageModel.from_pretrained(
        model_name=model, max_seq_length=64, load_in_4bit=True, fast_inference=True, max_lora_rank=32
    )
    loaded = grpo_fast.FastLanguageModel.get_peft_model(
        loaded, r=32, target_modules=ADAPTERS, lora_alpha=32, use_gradient_checkpointing="unsloth"
    )
    trainer = grpo_fast.GRPOTrainer(
        model=loaded,
        processing_class=tokenizer,
        reward_funcs=[tags_so_far],
        args=grpo_fast.GRPOConfig(**SCRIPT | SMALL),
        train_dataset=Dataset.from_list(QUESTIONS).map(with_turns),
        display=False,
        dtype="float32",
    )
    run = trainer.train()
    assert (run.config.model.quantization, run.config.model.lora.r) == ("nf4", 32)
    assert any("4bit" in type(module).__name__ for module in trainer.model.modules())
    assert (run.metrics.loc[1:, "grad_norm"] > 0).any()


def test_a_second_stage_begins_with_the_weights_of_the_first(model):
    """004: multi-stage training."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer, start = AutoTokenizer.from_pretrained(model), loaded.model.norm.weight.clone()
    ends = []
    for number, rewards in enumerate(([tags_so_far, in_blocks], [in_blocks, is_seven])):
        trainer = grpo_fast.GRPOTrainer(
            model=loaded,
            processing_class=tokenizer,
            reward_funcs=rewards,
            args=grpo_fast.GRPOConfig(**SCRIPT | SMALL | {"output_dir": f"stage{number}"}),
            train_dataset=Dataset.from_list(QUESTIONS).map(with_turns),
            display=False,
            **{"rollout.function": says(*DRAFTS)},
        )
        trainer.train()
        ends.append(trainer.model.model.norm.weight.clone())
    second = AutoModelForCausalLM.from_pretrained("stage1/inputs/model").model.norm.weight
    assert torch.equal(second, ends[0]) and not torch.equal(ends[0], start)
    assert not torch.equal(ends[1], ends[0]) and torch.equal(loaded.model.norm.weight, ends[1])


class Scaled:
    """A reward whose weight a callback moves."""

    __name__ = "scaled"

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, completions, **columns) -> list[float]:
        return [self.weight * score for score in tags_so_far(completions)]

    def adjust(self, success: float) -> None:
        self.weight *= 1.2 if success < 0.3 else 0.9 if success > 0.8 else 1.0


def test_rewards_gain_weight_while_they_are_low_and_read_a_csv_file(model):
    """004: adaptive reward scaling, a custom dataset."""
    pandas.DataFrame({"question": [f"{i} plus {7 - i}" for i in range(4)], "expert_answer": [7] * 4}).to_csv(
        "base.csv", index=False
    )
    scaled = Scaled()

    class Follows(grpo_fast.Callback):
        def on_step_end(self, step, metrics) -> None:
            scaled.adjust(metrics["reward/is_seven/mean"] / 2)

    run = train(
        model,
        dataset={
            "source": "base.csv",
            "prompt_column": "question",
            "rename": {"expert_answer": "solution"},
            "system_prompt": SYSTEM,
        },
        rewards=[scaled, is_seven],
        callbacks=[Follows()],
        adaptive_weights={"targets": {"is_seven": 1.0}, "smoothing": 1.0},
        rollout={"function": says("<think> 3", "</think> <answer> 4")},
    )
    assert samples(run, 1)[0]["prompt"].startswith(f"system {SYSTEM} user ")
    low = run.metrics.filter(regex="reward/.*caled.*/mean").loc[1:].iloc[:, 0]
    assert low[2] == pytest.approx(1.2 * low[1]) and scaled.weight == pytest.approx(1.44)
    weights = run.metrics["reward/is_seven/weight"]
    assert weights[2] > weights[1] >= 1


@pytest.mark.parametrize(
    ("changes", "alert", "seen", "remedy"),
    [
        pytest.param({}, "unique_completions", "mode collapse", "temperature", id="same completions"),
        pytest.param({}, "flat_groups", "no spread", "rollout.num_generations", id="no reward_std"),
        pytest.param(
            {"alerts.stale_rewards": 0.1}, "stale_rewards", "nothing to learn", "preview", id="stuck"
        ),
        pytest.param({"alerts.truncated": 0.4}, "truncated", "cut off", "max_completion_length", id="length"),
        pytest.param({"beta": 0.01}, "kl", "KL to the reference", "learning_rate", id="kl above 0.5"),
    ],
)
def test_a_warning_sign_raises_an_alert_with_its_cause_and_a_remedy(model, changes, alert, seen, remedy):
    """004: warning signs, pitfalls; 003: monitoring, common issues."""
    free = alert in ("kl", "truncated")
    run = train(
        model,
        learning_rate=0.3,
        rewards=tags_so_far,
        rollout={} if free else {"function": says(WHOLE)},
        **{"alerts.window": 2 if alert == "stale_rewards" else 1},
        **changes,
    )
    alerts = read_jsonl(run.folder / "alerts.jsonl")
    texts = [record["text"] for record in alerts if (record["alert"], record["state"]) == (alert, "raised")]
    assert seen in texts[0] and remedy in texts[0]


def test_preview_shows_completions_and_rewards_without_training(model, capsys):
    """004: the quick debug reward, debugging workflow."""
    Path("debug.py").write_text("def debug(completions, **columns):\n    return [1.0] * len(completions)\n")
    Path("rows.jsonl").write_text(json.dumps({"prompt": "3 plus 4"}) + "\n")
    settings = {"model.path": model, "dataset.source": "rows.jsonl", "rollout.num_generations": 2}
    settings |= {"rollout.max_completion_length": 4, "rewards": "[{reward: debug.py:debug}]"}
    Path("run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))

    assert main(["preview", "run.yaml", "--num-prompts", "1"]) == 0

    shown = capsys.readouterr().out
    assert "user 3 plus 4 assistant" in shown and len(re.findall(r"debug\W+1", shown)) >= 2
    assert not Path("runs").exists()


# ------------------------------------------------------------------------- ranked groups and preferences


RANKED = [
    {
        "prompt": f"{number} plus 2",
        "group": [
            {"response": "it is", "rank": 2},
            {"response": "cats so", "rank": 3},
            {"response": f"so {number + 2}", "rank": 1},
        ],
        "group_type": ["sums", "others"][number % 2],
    }
    for number in range(8)
]


def in_rank_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The guide's preprocessing."""
    return [row | {"group": sorted(row["group"], key=lambda response: response["rank"])} for row in rows]


def ranked(model: str, ranking: dict[str, Any], rows: Any = RANKED, **changes: Any) -> grpo_fast.Run:
    held_out = [row | {"prompt": row["prompt"].replace("2", "3")} for row in RANKED[:6]]
    common = {
        "algorithm": "rank",
        "dataset": rows,
        "evaluation": held_out,
        "preference": {"ranking": ranking},
    }
    return train(model, **common | {"prompts_per_step": 4} | changes)


@pytest.mark.parametrize(
    "ranking",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"objective": "group_relative", "temperature": 0.1}, id="grpo parameters"),
    ],
)
def test_ranked_groups_train_and_are_scored_by_type(model, ranking):
    """002: group structure, preprocessing, training script, parameters, evaluation, group analysis."""
    memory = {"gradient_checkpointing": True, "learning_rate": 5e-3, "prompts_per_step": 8}
    run = ranked(model, ranking, **memory)
    again = ranked(model, ranking, in_rank_order(RANKED), **memory, overwrite=True)

    steps = run.metrics
    assert steps["loss"].tolist()[1:] == pytest.approx(again.metrics["loss"].tolist()[1:], rel=1e-4)
    assert steps["grad_norm"].loc[1:].gt(0).all() and steps["memory/peak_bytes"].loc[1:].gt(0).all()
    assert {"learning_rate", "ranking/pairwise_accuracy"} <= {*steps}
    kept = [
        [
            logprob(run.policy, f"user {row['prompt'].replace('2', '3')} assistant", f"{of['response']} </s>")
            for of in row["group"]
        ]
        for row in RANKED[:6]
    ]
    orders = [[a > b, a > c, b > c] for b, c, a in kept]
    by_row = [sum(order) / 3 for order in orders]
    last = steps.iloc[-1]
    assert last["eval/ranking/sum/pairwise_accuracy"] == pytest.approx(sum(by_row) / 6)
    types = {"sums": by_row[::2], "others": by_row[1::2]}
    for name, found in types.items():
        assert last[f"eval/ranking/pairwise_accuracy/{name}"] == pytest.approx(sum(found) / 3)
        spread = torch.tensor(found).std(correction=0).item()
        assert last[f"eval/ranking/consistency/{name}"] == pytest.approx(1 - spread)
    assert steps["loss"][2] < steps["loss"][1]


# ------------------------------------------------------------ NeMo: groups of prompts, GRPO's custom losses


TOPICS = ["cats", "dogs", "it is", "so so"]
LEVELS = [0, 5, 2, 7, 4, 1, 6, 3]  # of the rewards: a topic's two prompts are not neighbors


def of_level(completions, level, **columns) -> list[float]:
    """Grow faster than a prompt's level, so that no two groups have one mean."""
    return [own**1.5 + 0.1 * (place % 2) for place, own in enumerate(level)]


def by_parity(prompts, step, total_steps, embeddings, rewards) -> list[list[int]]:
    """A strategy that wants all that there is."""
    assert (len(embeddings), len(rewards), total_steps) == (len(prompts), len(prompts), 2) and step in (
        0,
        1,
        2,
    )
    return [[n for n, prompt in enumerate(prompts) if prompt.index % 2 == side] for side in (0, 1)]


def grouped(
    model: str, groups: dict[str, Any], levels: Sequence[int] = LEVELS, **changes: Any
) -> grpo_fast.Run:
    """Every step has all eight prompts: two of each of four topics, each with its level of reward."""
    rows = [
        {
            "prompt": f"{TOPICS[place % 4]} ends {TOPICS[place % 4]} {place}",
            "level": level,
            "domain": "dialogue" if place < 4 else "code_generation",
            "coherence": place / 8,
            "engagement": 1 - place / 8,
        }
        for place, level in enumerate(levels)
    ]
    settings = {
        "rewards": of_level,
        "num_generations": 2,
        "prompts_per_step": 8,
        "advantage.scale_rewards": "none",
    }
    return train(model, dataset=rows, groups=groups, **settings | changes)


def members(run: grpo_fast.Run, step: int) -> set[frozenset[int]]:
    """Which rows share a baseline, a reward less its advantage."""
    found: dict[float, set[int]] = {}
    for sample in samples(run, step):
        row = int(re.search(r"(\d+) assistant", sample["prompt"])[1])
        found.setdefault(round(sample["reward"] - sample["advantage"], 3), set()).add(row)
    return {frozenset(rows) for rows in found.values()}


def pairs_of(levels: Sequence[int]) -> set[frozenset[int]]:
    """Neighbors in reward, two by two."""
    order = sorted(range(8), key=levels.__getitem__)
    return {frozenset(order[place : place + 2]) for place in range(0, 8, 2)}


TOPIC_PAIRS = {frozenset((place, place + 4)) for place in range(4)}
PAIRS = {"min_group_size": 2, "max_group_size": 2}
AGREED = [0, 2, 4, 6, 1, 3, 5, 7]  # levels by which a topic's two prompts are neighbors
PHASES = [{"until": 0.3, "strategy": "random"}, {"until": 0.7, "strategy": "performance"}]
PHASES += [{"until": 1.0, "strategy": "semantic"}]
CRITERIA = [{"by": "embedding", "weight": 0.4}, {"by": "reward", "weight": 0.3}]
CRITERIA += [{"by": "diversity", "weight": 0.3}]


@pytest.mark.parametrize(
    ("groups", "levels", "expected"),
    [
        pytest.param({"strategy": "semantic"}, LEVELS, TOPIC_PAIRS, id="semantic grouping (000, 001)"),
        pytest.param(
            {"strategy": "performance"}, LEVELS, pairs_of(LEVELS), id="performance grouping (000, 001)"
        ),
        pytest.param(
            {"strategy": "combined", "criteria": CRITERIA, "similarity_threshold": 0.6},
            AGREED,
            TOPIC_PAIRS,
            id="multiple criteria (000, 001)",
        ),
        pytest.param(
            {"strategy": by_parity, "max_group_size": 4},
            LEVELS,
            {frozenset(range(0, 8, 2)), frozenset(range(1, 8, 2))},
            id="a trainer's own groups (000, 001)",
        ),
    ],
)
def test_prompts_that_a_strategy_joins_share_a_baseline(model, groups, levels, expected):
    """000, 001: group formation, the quality of groups, debugging, training metrics of GRPO."""
    run = grouped(model, PAIRS | groups, levels, rollout={"function": says("cats plus 3", "dogs so")})
    assert members(run, 1) == members(run, 2) == expected
    shown = run.metrics.loc[1:]
    assert (
        shown["groups/number"].eq(len(expected)).all()
        and shown["groups/size_mean"].eq(8 / len(expected)).all()
    )
    assert shown["groups/diversity"].between(0, 1).all() and shown["groups/centroid_distance"].gt(0).all()


def test_random_groups_are_full_change_and_are_wider_than_semantic_ones(model):
    """000, 001: group formation strategies, group quality."""
    run, near = (
        grouped(model, PAIRS | {"strategy": "random"}),
        grouped(model, PAIRS | {"strategy": "similarity"}, output_dir="near"),
    )
    first, second = members(run, 1), members(run, 2)
    assert all(sorted(row for group in step for row in group) == [*range(8)] for step in (first, second))
    assert {len(group) for group in first | second} == {2} and first != second
    distances = [one.metrics["groups/centroid_distance"].loc[1:].mean() for one in (run, near)]
    assert distances[0] > 1.1 * distances[1]


def test_groups_follow_the_progress_of_the_run(model):
    """000, 001: adaptive grouping."""
    run = grouped(model, PAIRS | {"strategy": "adaptive", "phases": PHASES}, max_steps=4)
    assert members(run, 1) != pairs_of(LEVELS) and members(run, 1) != TOPIC_PAIRS
    assert members(run, 3) == pairs_of(LEVELS) and members(run, 4) == TOPIC_PAIRS


def test_the_largest_group_follows_the_domain(model):
    """000: select_group_size."""
    sizes = {"column": "domain", "dialogue": 2, "code_generation": 4}
    run = grouped(model, {"strategy": "random", "min_group_size": 2, "size_by": sizes})
    groups = sorted(members(run, 1), key=min)
    assert [len(group) for group in groups] == [2, 2, 4] and groups[2] == {4, 5, 6, 7}


def test_preview_counts_groups_before_training(model, capsys):
    """000, 001: debugging tips."""
    rows = [json.dumps({"prompt": f"{TOPICS[place % 4]} ends {place}"}) for place in range(8)]
    Path("rows.jsonl").write_text("\n".join(rows))
    settings = {
        "model": {"path": model},
        "dataset": {"source": "rows.jsonl"},
        "rewards": [{"reward": "length", "options": {"target": 3}}],
    }
    settings |= {"prompts_per_step": 8, "groups": PAIRS | {"strategy": "semantic"}}
    Path("run.yaml").write_text(yaml.safe_dump(settings))

    assert main(["preview", "run.yaml", "--groups"]) == 0

    shown = capsys.readouterr().out
    assert re.search(r"number 4\b.*size_mean 2\b.*centroid_distance", shown) and shown.count("2 prompts") == 4


def dialogue_loss(inputs: grpo_fast.LossInputs) -> grpo_fast.LossOutputs:
    """GRPO's clipped surrogate, a tenth of the spread within groups, and two columns of the data."""
    ratio = (
        (inputs.logprobs - inputs.old_logprobs).exp()
        if inputs.old_logprobs is not None
        else (inputs.logprobs - inputs.logprobs.detach()).exp()
    )
    surrogate = torch.minimum(ratio * inputs.advantages, ratio.clamp(0.8, 1.2) * inputs.advantages)
    center = inputs.groups.spread(inputs.groups.mean(inputs.logprobs))
    spread = (inputs.logprobs - center).square()[inputs.loss_mask].mean()
    said = -inputs.logprobs * (1 - inputs.columns["coherence"] + 1 - inputs.columns["engagement"])
    talk = 1.5 * said[inputs.loss_mask].mean()
    found = {"groups/seen": torch.tensor(float(len(inputs.group_ids.unique()))), "spread": spread.detach()}
    return grpo_fast.LossOutputs(
        -surrogate[inputs.loss_mask].mean() + 0.1 * spread + talk, found | {"talk": talk.detach()}
    )


def test_a_custom_loss_sees_groups_and_columns_of_the_data(model):
    """000, 001: custom loss functions, GRPO for dialogue systems."""
    loss = {"loss_type": dialogue_loss, "columns": ["coherence", "engagement"]}
    run = grouped(model, PAIRS | {"strategy": "semantic"}, loss=loss)
    steps = run.metrics.loc[1:]
    assert steps["groups/seen"].eq(4).all() and steps["grad_norm"].gt(0).all()
    assert steps["spread"][2] != steps["spread"][1] and steps["talk"][2] < steps["talk"][1]


def diverging(inputs: grpo_fast.LossInputs) -> grpo_fast.LossOutputs:
    return grpo_fast.LossOutputs(inputs.logprobs.sum() * torch.nan)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_itself(model):
    """001: validating custom losses."""
    with pytest.raises(ValueError, match=r"diverging.*not finite"):
        grouped(model, {}, loss={"loss_type": diverging})


@pytest.mark.parametrize(("level", "factor"), [(0.2, 1.1), (0.7, 1.0), (0.9, 0.9)])
def test_the_learning_rate_rises_while_groups_do_badly_and_falls_after(model, level, factor):
    """000, 001: adaptive training of GRPO."""
    band = {"metric": "reward/mean", "below": 0.5, "above": 0.8, "step": 0.1, "min": 0.5, "max": 2.0}
    run = grouped(model, {}, [level] * 8, **{"optimizer.band": band})
    assert run.metrics["learning_rate"].tolist()[1:] == pytest.approx([1e-2, factor * 1e-2])


def test_a_critic_is_refused_in_one_sentence(model):
    """000, 001: `value_loss_coef` of the configuration and of the custom loss."""
    assert load_config(
        None,
        {
            "model.path": "m",
            "dataset.source": "d",
            "rewards": [{"reward": "length"}],
            "loss.value_loss_coef": 0,
        },
    )
    with pytest.raises(ValueError, match=r"value_loss_coef = 0\.5: there is no critic"):
        grouped(model, {}, loss={"value_loss_coef": 0.5})


# ---------------------------------------------------------------------------------- NeMo: losses of pairs


PAIRS_OF_TEXT = [
    {
        "prompt": f"{place} plus 2",
        "chosen": f"so {place + 2}",
        "rejected": "cats so",
        "math_correctness": place % 2,
        "syntax_scores": place / 8,
    }
    for place in range(8)
]


def compared(model: str, loss: dict[str, Any], **changes: Any) -> grpo_fast.Run:
    """Every step has all eight pairs."""
    preference = {"loss": loss} | changes.pop("preference", {})
    common = {"algorithm": "dpo", "dataset": PAIRS_OF_TEXT, "preference": preference, "prompts_per_step": 8}
    return train(model, **common | changes)


def plain(scores: PairScores) -> torch.Tensor:
    return -logsigmoid(scores.chosen - scores.rejected)


def mathematical(scores: PairScores) -> torch.Tensor:
    """Log-ratios count twice."""
    return -logsigmoid(2.0 * (scores.chosen - scores.rejected))


def with_correctness(scores: PairScores) -> torch.Tensor:
    return -logsigmoid(scores.chosen + 2.0 * scores.columns["math_correctness"] - scores.rejected)


def with_syntax(scores: PairScores) -> torch.Tensor:
    return -logsigmoid(scores.chosen + scores.columns["syntax_scores"] - scores.rejected)


def fluency(scores: PairScores) -> torch.Tensor:
    return -scores.inputs.chosen_logprobs / scores.inputs.chosen_lengths


def coherence(scores: PairScores) -> torch.Tensor:
    return -scores.chosen * scores.columns["syntax_scores"]


def mean_of(bonus: Sequence[float]) -> float:
    """The loss of the first step, when log-ratios are zero."""
    return -logsigmoid(torch.tensor(bonus)).mean().item()


CORRECT = [2.0 * row["math_correctness"] for row in PAIRS_OF_TEXT]
SYNTAX = [row["syntax_scores"] for row in PAIRS_OF_TEXT]


@pytest.mark.parametrize(
    ("loss", "first", "built_in"),
    [
        pytest.param({"loss_type": plain}, mean_of([0.0]), 1.0, id="custom DPO loss"),
        pytest.param({"loss_type": mathematical}, mean_of([0.0]), 2.0, id="mathematical reasoning"),
        pytest.param(
            {"loss_type": with_syntax, "columns": ["syntax_scores"]},
            mean_of(SYNTAX),
            None,
            id="code generation",
        ),
        pytest.param(
            {"loss_type": with_correctness, "columns": ["math_correctness"]},
            mean_of(CORRECT),
            None,
            id="DPO for math reasoning",
        ),
    ],
)
def test_a_custom_loss_of_pairs_reads_log_ratios_and_columns(model, loss, first, built_in):
    """001: loss functions of DPO, domains, the complete example; training metrics, debugging."""
    run = compared(model, loss)
    steps = run.metrics.loc[1:]
    assert steps["loss"][1] == pytest.approx(first, rel=1e-4) and steps["loss"][2] < steps["loss"][1]
    gap = steps["rewards/chosen"] - steps["rewards/rejected"]
    assert gap.tolist() == pytest.approx(steps["rewards/margins"].tolist(), abs=1e-5) and gap[2] > 0
    assert steps["rewards/chosen_min"][2] <= steps["rewards/chosen"][2] <= steps["rewards/chosen_max"][2]
    if built_in:  # the standard implementation, by its beta
        same = compared(model, {"loss_type": "sigmoid", "beta": built_in}, output_dir="same")
        assert steps["loss"].tolist() == pytest.approx(same.metrics["loss"].tolist()[1:], rel=1e-4)


def test_objectives_add_up_by_their_weights(model):
    """001: multi-objective DPO."""
    loss = {"loss_type": ["sigmoid", fluency, coherence], "loss_weights": [1.0, 0.1, 0.2], "beta": 0.1}
    steps = compared(model, loss | {"columns": ["syntax_scores"]}).metrics.loc[1:]
    parts = steps["loss/sigmoid"] + 0.1 * steps["loss/fluency"] + 0.2 * steps["loss/coherence"]
    assert steps["loss"].tolist() == pytest.approx(parts.tolist(), rel=1e-4)
    assert steps["loss/fluency"][2] < steps["loss/fluency"][1] and steps["loss/coherence"][2] != 0


@pytest.mark.parametrize(
    ("beta", "rate", "expected"),
    [
        pytest.param({"schedule": "linear", "final": 0.05}, 1e-3, [0.2, 0.15, 0.1, 0.05], id="linear"),
        pytest.param(
            {"band": {"below": 0.1, "above": 0.5, "step": 0.1}}, 1e-6, [0.2, 0.22, 0.242], id="rises"
        ),
        pytest.param({"band": {"below": -2, "above": -1, "step": 0.1}}, 1e-6, [0.2, 0.18, 0.162], id="falls"),
    ],
)
def test_beta_follows_the_run_or_the_reward_gap(model, beta, rate, expected):
    """001: adaptive beta scheduling, adaptive training of DPO."""
    bounds = {"min": 0.05, "max": 1.0} if "band" in beta else {}
    run = compared(
        model,
        {"loss_type": "sigmoid", "beta": 0.2},
        preference={"beta": beta | bounds},
        learning_rate=rate,
        max_steps=len(expected),
    )
    assert run.metrics["beta"].tolist()[1:] == pytest.approx(expected)


# ------------------------------------------------------------------- configuration files of the guides


AXOLOTL = """
base_model: {model}
rl: grpo
trl:
  beta: 0.001
  max_completion_length: 512
  num_generations: 16
  use_vllm: true
  reward_funcs: [mine.shorter]
vllm:
  host: 0.0.0.0
  port: 8000
  tensor_parallel_size: 1
  gpu_memory_utilization: 0.7
  max_model_len: 800
learning_rate: 1.0e-6
gradient_accumulation_steps: 1
micro_batch_size: 16
gradient_checkpointing: true
datasets:
  - path: rows.jsonl
"""
TUTORIAL = """
model:
  name: {model}
  max_length: 512
training:
  batch_size: 1
  learning_rate: 5e-6
  num_epochs: 3
  warmup_steps: 100
  group_size: 3
data:
  train_file: ranked.json
  validation_file: held_out.json
  max_seq_length: 512
"""
CUSTOM_GRPO = """
algorithm:
  name: custom_grpo
  group_size: 4
  group_strategy: semantic
  grouping: {similarity_threshold: 0.8, max_group_size: 6, min_group_size: 2}
  learning_rate: 3e-4
  clip_ratio: 0.2
  value_loss_coef: 0.5
  entropy_coef: 0.01
"""
CUSTOM_DPO = """
algorithm:
  name: custom_dpo
  beta: 0.1
  loss: {type: custom_math_reasoning, math_weight: 2.0, syntax_weight: 1.5}
  learning_rate: 1e-5
  max_grad_norm: 1.0
  warmup_steps: 100
"""
MINE = '''
def shorter(prompts, completions, labels, context=None):
    """Axolotl's signature: labels are the answers, the context has all columns."""
    assert labels == [str(int(question[0]) + 2) for question in context["question"]]
    return [1.0 - len(str(completion)) / 1000 for completion in completions]


def with_turns(example, tokenizer=None):
    assert tokenizer is not None
    turns = [{"role": "user", "content": example["question"]}]
    return {"prompt": turns, "answer": example["reference_answer"]}


def mathematical(scores):
    import torch

    return -torch.nn.functional.logsigmoid(2.0 * (scores.chosen - scores.rejected))
'''
FROM_FILES = [
    pytest.param(
        AXOLOTL,
        ["dataset.transform=mine.py:with_turns", "rewards=[{reward: mine.py:shorter}]", "max_steps=2"],
        {
            **{"loss.beta": 0.001, "rollout.num_generations": 16, "optimizer.learning_rate": 1e-6},
            **{"model.gradient_checkpointing": True, "prompts_per_step": 1, "rollout.engine": "vllm"},
            **{"rollout.vllm.gpu_memory_utilization": 0.7, "rollout.vllm.max_model_length": 800},
        },
        "port",
        id="003: training parameters, vLLM, optimization, reward function, data format, memory",
    ),
    pytest.param(
        TUTORIAL,
        [],
        {
            **{"algorithm": "rank", "optimizer.learning_rate": 5e-6, "prompts_per_step": 1, "epochs": 3},
            **{"optimizer.warmup_steps": 100, "dataset.source": "ranked.json"},
        },
        "group_size",
        id="002: configuration setup, model loading",
    ),
    pytest.param(
        CUSTOM_GRPO,
        [
            "model.path={model}",
            "prompts_per_step=8",
            "max_steps=2",
            "dataset.source=prompts.jsonl",
            "rewards=[{reward: length, options: {target: 3}}]",
        ],
        {
            **{"rollout.num_generations": 4, "groups.strategy": "semantic", "loss.epsilon_low": 0.2},
            **{"groups.similarity_threshold": 0.8, "groups.max_group_size": 6, "groups.min_group_size": 2},
            **{"optimizer.learning_rate": 3e-4, "loss.entropy_coef": 0.01, "loss.value_loss_coef": 0},
        },
        "value_loss_coef",
        id="000, 001: custom GRPO configuration, integration",
    ),
    pytest.param(
        CUSTOM_DPO,
        [
            "model.path={model}",
            "prompts_per_step=8",
            "max_steps=2",
            "optimizer.warmup_steps=1",
            "dataset.source=pairs.jsonl",
            "preference.loss.loss_type=mine.py:mathematical",
        ],
        {
            **{"algorithm": "dpo", "preference.loss.beta": 0.1, "optimizer.learning_rate": 1e-5},
            "optimizer.max_grad_norm": 1.0,
        },
        "custom_math_reasoning",
        id="001: custom DPO configuration, integration",
    ),
]


@pytest.mark.parametrize(("text", "missing", "expected", "told"), FROM_FILES)
def test_a_guides_file_trains_as_it_stands_and_says_what_became_of_it(
    model, text, missing, expected, told, capsys
):
    Path("mine.py").write_text(MINE)
    rows = [{"question": f"{n} plus 2", "reference_answer": str(n + 2)} for n in range(4)]
    held_out = [row | {"prompt": "7 plus 3"} for row in RANKED[:2]]
    prompts = [{"prompt": f"cats {n}"} for n in range(8)]
    Path("guide.yaml").write_text(text.replace("{model}", model))
    for name, content in {"rows": rows, "prompts": prompts, "pairs": PAIRS_OF_TEXT}.items():
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    for name, content in {"ranked": RANKED, "held_out": held_out}.items():
        Path(f"{name}.json").write_text(json.dumps(content))
    given = ["train", "guide.yaml", *(word.replace("{model}", model) for word in missing)]

    code, printed = main([*given, "--print-config"]), capsys.readouterr()
    assert code == 0, printed.err
    found = flatten(yaml.safe_load(printed.out))
    assert told in printed.err
    for place, value in expected.items():
        assert (
            str(found[place]).endswith(str(value)) if place.endswith("source") else found[place] == value
        ), place
    small = ["model.dtype=float32", "output_dir=out", "logging.tensorboard=false"]
    if found["algorithm"] == "grpo":
        small += ["rollout.engine=transformers", "rollout.max_completion_length=8"]
    if found["algorithm"] == "rank":
        small += ["max_steps=2", "optimizer.warmup_steps=0"]
    assert main([*given, *small]) == 0, capsys.readouterr().err
    assert len(read_jsonl(Path("out/metrics.jsonl"))) == 3


def test_a_script_converts_into_a_run_that_trains(model, capsys):
    """004: the template; a whole script read without running it."""
    Path("script.py").write_text(
        f"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def lively(completions, **kwargs):
    return [float(len(set(str(text).split()))) for text in completions]

args = GRPOConfig(output_dir="out", learning_rate=5e-6, num_generations=4, max_completion_length=8,
                  max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none")
dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
trainer = GRPOTrainer(model={model!r}, reward_funcs=[lively], args=args, train_dataset=dataset)
trainer.train()
"""
    )
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"cats {n}"}) for n in range(4)))

    assert main(["convert", "script.py", "-o", "run.yaml"]) == 0
    assert main(["train", "run.yaml", "model.dtype=float32"]) == 0

    records = read_jsonl(Path("out/metrics.jsonl"))
    assert len(records) == 3 and records[1]["reward/lively/mean"] > 0


def test_the_page_names_every_test_of_this_file_and_no_other():
    page = Path(__file__).parents[1].joinpath("docs/guides.md").read_text(encoding="utf-8")
    here = {name for name, value in globals().items() if name.startswith("test_") and callable(value)}
    named = set(re.findall(r"`(test_\w+)` \|", page))
    assert named == here - {"test_the_page_names_every_test_of_this_file_and_no_other"}
