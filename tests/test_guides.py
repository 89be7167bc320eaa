"""What the five guides show, done here: for each of their blocks a case on two steps of a tiny model.

`docs/guides.md` is the table of the guides' sections and of these tests.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import grpo_fast
from grpo_fast.cli import main
from grpo_fast.config.keys import ConfigError
from grpo_fast.config.load import load_config
from grpo_fast.config.tree import flatten
from grpo_fast.objective import GRPOLossConfig, LossInputs, LossOutputs, PairScores, policy_loss
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


def token_logprobs(policy: Any, question: str, answer: str) -> torch.Tensor:
    """(N,) of the N tokens of an answer after a question."""
    asked, said = (torch.tensor(policy.tokenizer(text)["input_ids"]) for text in (question, answer))
    with torch.no_grad():
        logits = policy.model(torch.cat([asked, said])[None]).logits[0].log_softmax(-1)
    return logits[len(asked) - 1 : -1].gather(1, said[:, None])[:, 0]


def logprob(policy: Any, question: str, answer: str) -> float:
    """Of an answer after a question, summed over its tokens."""
    return token_logprobs(policy, question, answer).sum().item()


def start_of(model: str, run: grpo_fast.Run) -> Any:
    """A policy with the weights that a run started from."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    return type("Start", (), {"model": loaded, "tokenizer": run.policy.tokenizer})


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
    start, question = start_of(model, run), first[0]["prompt"]
    gain = {text: logprob(run.policy, question, text) - logprob(start, question, text) for text in DRAFTS}
    assert gain[DRAFTS[4]] > max(0, gain[DRAFTS[2]])  # against the worst


GUIDES = yaml.safe_load(Path(__file__).with_name("guides.yaml").read_text(encoding="utf-8"))
SCRIPT, LARGE, SMALL = (GUIDES[name] for name in ("script", "large", "small"))
QUESTIONS = [{"question": f"{i} plus {7 - i}", "raw_answer": "so it is #### 7"} for i in range(8)]
LOGGED = {"logging.samples_every": 1, "logging.samples": 100}
ADAPTERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_turns(row: dict[str, str]) -> dict[str, Any]:
    """The function of a `dataset.map`."""
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": turns, "solution": row["raw_answer"].rpartition("####")[2].strip()}


def scripted(model: Any, tokenizer: Any, rewards: list[Any], args: Any = None, **more: Any) -> Any:
    """The trainer of a guide's script."""
    data = Dataset.from_list(QUESTIONS).map(with_turns)
    config = grpo_fast.GRPOConfig(**SCRIPT | SMALL | (args or {}))
    common = {"processing_class": tokenizer, "args": config, "train_dataset": data, "display": False}
    return grpo_fast.GRPOTrainer(model=model, reward_funcs=rewards, **common | more)


@pytest.mark.parametrize(
    ("args", "expected"), [(SCRIPT | {"report_to": "wandb"}, "script_places"), (LARGE, "large_places")]
)
def test_a_training_configuration_of_trl_keeps_its_values_and_trains(model, args, expected):
    places = trl_places(grpo_fast.GRPOConfig("out", **args), {"reward_funcs": ["length"]})
    config = load_config(places | {"model.path": "m", "dataset.source": "d"})
    found = flatten(config.model_dump(mode="json"))
    for place, value in GUIDES[expected].items():
        assert found[place] == value, place
    own = args | SMALL | {"use_vllm": False}
    run = scripted(model, AutoTokenizer.from_pretrained(model), [tags_so_far], own, **LOGGED).train()
    assert len(samples(run, 1)) == len(samples(run, 2)) == args["num_generations"]


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
        lora = LoraConfig("CAUSAL_LM", r=16, lora_alpha=32, target_modules=ADAPTERS, lora_dropout=0.05)
        more = {"peft_config": lora, "logging.samples_every": 1, "alerts": {"window": 1, "kl": 1e-9}}
        trainer = scripted(loaded, tokenizer, [tags_so_far, in_blocks, is_seven], **more)
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
    # Of one update it is beta times the KL.
    assert abs(kept["loss"][1]) < 1e-6 < kept["loss"][2] < kept["kl"][2]
    assert (kept["memory/peak_bytes"] > 0).all()


def alerts_of(run: grpo_fast.Run) -> dict[str, str]:
    """The text of each alert that a run raised."""
    return {line["alert"]: line["text"] for line in read_jsonl(run.folder / "alerts.jsonl")}


def test_collapse_and_drift_raise_an_alert_with_what_to_try(model, script):
    """003, 004: common issues, warning signs, common problems."""
    run = train(model, alerts={"window": 1}, rollout={"function": says("cats")})
    texts = {**alerts_of(run), "kl": alerts_of(script.run)["kl"]}
    for alert, remedy in {
        "unique_completions": "rollout.temperature",
        "flat_groups": "rollout.num_generations",
        "stale_rewards": "grpo-fast preview",
        "kl": "raise loss.beta, lower optimizer.learning_rate",
    }.items():
        assert "\n  try: " in texts[alert] and remedy in texts[alert].replace("\n", " ")


def test_merged_adapters_load_in_transformers_and_answer_a_conversation(script):
    """004: saving and merging LoRA, inference; memory of adapters."""
    folder = script.run.folder.parent
    ids = torch.tensor([[20, 21, 22]])
    start = AutoModelForCausalLM.from_pretrained(folder / "out/inputs/model")
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
    trainer = scripted(loaded, tokenizer, [tags_so_far], dtype="float32")
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
        more = {"rollout.function": says(*DRAFTS)}
        trainer = scripted(loaded, tokenizer, rewards, {"output_dir": f"stage{number}"}, **more)
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
    Path("base.csv").write_text(
        "question,expert_answer\n" + "".join(f"{i} plus {7 - i},7\n" for i in range(4))
    )
    data = {"source": "base.csv", "prompt_column": "question", "rename": {"expert_answer": "solution"}}

    class Follows(grpo_fast.Callback):
        def __init__(self) -> None:
            self.reward = Scaled()

        def on_step_end(self, step, metrics) -> None:
            self.reward.adjust(metrics["reward/is_seven/mean"] / 2)

        def state_dict(self) -> dict[str, float]:
            return {"weight": self.reward.weight}

        def load_state_dict(self, state) -> None:
            self.reward.weight = state["weight"]

    rollout = {"function": says("<think> 3", "</think> <answer> 4")}
    changes = {"adaptive_weights": {"targets": {"is_seven": 1.0}, "smoothing": 1.0}, "rollout": rollout}
    changes["dataset"] = data | {"system_prompt": SYSTEM}
    for more in ({}, {"max_steps": 3, "resume": "latest"}):
        follows = Follows()
        run = train(model, rewards=[follows.reward, is_seven], callbacks=[follows], **changes | more)
    assert samples(run, 1)[0]["prompt"].startswith(f"system {SYSTEM} user ")
    low = run.metrics.filter(regex="reward/.*caled.*/mean").loc[1:].iloc[:, 0]
    assert low.tolist() == pytest.approx([low[1], 1.2 * low[1], 1.44 * low[1]])
    weights = run.metrics["reward/is_seven/weight"]
    assert weights[3] > weights[2] > weights[1] >= 1


def write_rows(name: str, rows: Sequence[Any]) -> None:
    Path(name).write_text(json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows)))


def preview(model: str, rows: list[Any], reward: Any, settings: dict[str, Any], *words: str) -> None:
    write_rows("rows.jsonl", rows)
    settings |= {"model.path": model, "dataset.source": "rows.jsonl", "rewards": [reward]}
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["preview", "run.yaml", *words]) == 0


def test_preview_shows_completions_and_rewards_without_training(model, capsys):
    """004: the quick debug reward, debugging workflow."""
    Path("debug.py").write_text("def debug(completions, **columns):\n    return [1.0] * len(completions)\n")
    settings = {"rollout.num_generations": 2, "rollout.max_completion_length": 4}
    preview(model, [{"prompt": "3 plus 4"}], {"reward": "debug.py:debug"}, settings, "--num-prompts", "1")
    shown = capsys.readouterr().out
    assert "user 3 plus 4 assistant" in shown and len(re.findall(r"debug\W+1", shown)) >= 2
    assert not Path("runs").exists()
    assert main(["preview", "run.yaml", "--groups", "prompts_per_step=1"]) == 2
    assert "strategy = 'prompt' makes each prompt a group" in capsys.readouterr().err


WRONG = [{"response": "it is", "rank": 2}, {"response": "cats so", "rank": 3}]
RANKED = [
    {"prompt": f"{n} plus 2", "group": [*WRONG, {"response": f"so {n + 2}", "rank": 1}], "group_type": kind}
    for n, kind in enumerate(["sums", "others"] * 4)
]
HELD_OUT = [row | {"prompt": row["prompt"].replace("2", "3")} for row in RANKED[:6]]


@pytest.mark.parametrize("ranking", [{}, {"objective": "group_relative", "temperature": 0.1}])
def test_ranked_groups_train_and_are_scored_by_type(model, ranking):
    """002: group structure, preprocessing, training script, parameters, evaluation, group analysis."""
    common = {"algorithm": "rank", "evaluation": HELD_OUT, "preference": {"ranking": ranking}}
    common |= {"gradient_checkpointing": True, "learning_rate": 5e-3, "prompts_per_step": 8}
    run = train(model, dataset=RANKED, **common)
    in_order = [row | {"group": sorted(row["group"], key=lambda one: one["rank"])} for row in RANKED]
    again = train(model, dataset=in_order, output_dir="again", **common)

    steps = run.metrics
    assert steps["loss"].tolist()[1:] == pytest.approx(again.metrics["loss"].tolist()[1:], rel=1e-4)
    assert steps["grad_norm"].loc[1:].gt(0).all() and steps["memory/peak_bytes"].loc[1:].gt(0).all()
    assert {"learning_rate", "ranking/pairwise_accuracy"} <= {*steps}
    by_row = []
    for row in HELD_OUT:
        texts = [f"{response['response']} </s>" for response in row["group"]]
        b, c, a = (logprob(run.policy, f"user {row['prompt']} assistant", text) for text in texts)
        by_row.append(((a > b) + (a > c) + (b > c)) / 3)
    last = steps.iloc[-1]
    assert last["eval/ranking/sum/pairwise_accuracy"] == pytest.approx(sum(by_row) / 6)
    for name, found in {"sums": by_row[::2], "others": by_row[1::2]}.items():
        assert last[f"eval/ranking/pairwise_accuracy/{name}"] == pytest.approx(sum(found) / 3)
        spread = torch.tensor(found).std(correction=0).item()
        assert last[f"eval/ranking/consistency/{name}"] == pytest.approx(1 - spread)
    assert steps["loss"][2] < steps["loss"][1]


TOPICS = ["cats", "dogs", "it is", "so so"]
LEVELS = [0, 5, 2, 7, 4, 1, 6, 3]  # of the rewards: a topic's two prompts are not neighbors


def of_level(completions, level, **columns) -> list[float]:
    """Grow faster than a prompt's level, so that no two groups have one mean."""
    return [own**1.5 + 0.1 * (place % 2) for place, own in enumerate(level)]


def by_parity(prompts, step, total_steps, embeddings, rewards) -> list[list[int]]:
    """A strategy that wants all that there is."""
    assert (len(embeddings), len(rewards), total_steps) == (len(prompts), len(prompts), 2) and 0 <= step <= 2
    return [[n for n, prompt in enumerate(prompts) if prompt.index % 2 == side] for side in (0, 1)]


def grouped(model: str, groups: Any, levels: Sequence[int] = LEVELS, **changes: Any) -> grpo_fast.Run:
    """Every step has all eight prompts: two of each of four topics, each with its level of reward."""
    rows = [
        {"prompt": f"{TOPICS[i % 4]} ends {TOPICS[i % 4]} {i}", "level": level}
        | {"domain": ["dialogue", "code_generation"][i // 4], "engagement": level / 8}
        for i, level in enumerate(levels)
    ]
    settings = {"rewards": of_level, "num_generations": 2, "prompts_per_step": 8}
    settings |= {"dataset": rows, "groups": groups, "advantage.scale_rewards": "none"}
    return train(model, **settings | changes)


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
COMBINED, ADAPTIVE = GUIDES["combined"], GUIDES["adaptive"]
PARITY = {frozenset(range(0, 8, 2)), frozenset(range(1, 8, 2))}


@pytest.mark.parametrize(
    ("groups", "levels", "expected"),
    [
        ({"strategy": "semantic"}, LEVELS, TOPIC_PAIRS),
        ({"strategy": "performance"}, LEVELS, pairs_of(LEVELS)),
        (COMBINED, AGREED, TOPIC_PAIRS),
        ({"strategy": by_parity, "max_group_size": 4}, LEVELS, PARITY),
    ],
)
def test_prompts_that_a_strategy_joins_share_a_baseline(model, groups, levels, expected):
    """000, 001: group formation, the quality of groups, debugging, training metrics of GRPO."""
    run = grouped(model, PAIRS | groups, levels, rollout={"function": says("cats plus 3", "dogs so")})
    assert members(run, 1) == members(run, 2) == expected
    shown = run.metrics.loc[1:]
    assert shown["groups/number"].eq(len(expected)).all()
    assert shown["groups/size_mean"].eq(8 / len(expected)).all()
    assert shown["groups/diversity"].between(0, 1).all() and shown["groups/centroid_distance"].gt(0).all()


def test_random_groups_are_full_change_and_are_wider_than_semantic_ones(model):
    """000, 001: group formation strategies, group quality."""
    run = grouped(model, PAIRS | {"strategy": "random"})
    near = grouped(model, PAIRS | {"strategy": "similarity"}, output_dir="near")
    first, second = members(run, 1), members(run, 2)
    assert all(sorted(row for group in step for row in group) == [*range(8)] for step in (first, second))
    assert {len(group) for group in first | second} == {2} and first != second
    distances = [one.metrics["groups/centroid_distance"].loc[1:].mean() for one in (run, near)]
    assert distances[0] > 1.1 * distances[1]


def test_groups_follow_the_progress_of_the_run(model):
    """000, 001: adaptive grouping."""
    run = grouped(model, PAIRS | ADAPTIVE, max_steps=4)
    assert members(run, 1) != pairs_of(LEVELS) and members(run, 1) != TOPIC_PAIRS
    assert members(run, 3) == pairs_of(LEVELS) and members(run, 4) == TOPIC_PAIRS


def test_the_largest_group_follows_the_domain(model):
    """000: select_group_size."""
    sizes = {"column": "domain", "dialogue": 2, "code_generation": 4}
    run = grouped(model, {"strategy": "random", "min_group_size": 2, "size_by": sizes})
    groups = sorted(members(run, 1), key=min)
    assert [len(group) for group in groups] == [2, 2, 4] and groups[2] == {4, 5, 6, 7}


def with_coherence(completions, level, log_extra, **columns) -> list[float]:
    """Log a metric of the dialogue."""
    log_extra("coherence", [len(set(text.split())) / 9 for text in content(completions)])
    return of_level(completions, level)


def of_dialogue(inputs: LossInputs) -> LossOutputs:
    """A clipped ratio, the variance of a group's log-probabilities, and two metrics of the dialogue."""
    groups, sequences = inputs.groups, inputs.sequences
    out = policy_loss(inputs, GRPOLossConfig("grpo"))
    spread = (groups.mean(inputs.logprobs.square()) - groups.mean(inputs.logprobs).square()).sum()
    both = inputs.columns["coherence"] + inputs.columns["engagement"]
    talk = -sequences.mean(both * inputs.logprobs).sum()
    regular = 0.1 * spread / inputs.totals.num_groups + 1.5 * talk / inputs.totals.num_sequences
    return LossOutputs(out.loss + regular, out.metrics)


TURNS = ["cats plus 3", "dogs so", "it is so so", "7"]
RISES = {"metric": "reward/mean", "below": 50, "above": 80, "min": 0.5, "max": 2.0}
FALLS = RISES | {"below": 0.5, "above": 0.8}


@pytest.fixture(scope="module")
def dialogues(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[grpo_fast.Run]:
    """The same two steps with GRPO's own loss, and with a dialogue's."""
    common = {"rewards": with_coherence, "num_generations": 4, "rollout": {"function": says(*TURNS)}}
    plain = {"loss": {"loss_type": "grpo", "value_loss_coef": 0}, "optimizer.band": RISES}
    own = {"loss": {"loss_type": of_dialogue, "columns": ["coherence", "engagement"]}}
    folder = str(tmp_path_factory.mktemp("dialogues"))
    return [
        grouped(model, PAIRS | {"strategy": "semantic"}, output_dir=f"{folder}/{name}", **common | changes)
        for name, changes in {"plain": plain, "own": own | {"optimizer.band": FALLS}}.items()
    ]


def test_a_loss_of_groups_and_of_dialogue_metrics_adds_to_the_policy_term(model, dialogues):
    """000, 001: custom GRPO loss, dialogue systems."""
    own = dialogues[1]
    start, prompts = start_of(model, own), {one["prompt"] for one in samples(own, 1)}
    assert members(own, 1) == TOPIC_PAIRS and len(prompts) == 8
    by_topic: dict[int, list[torch.Tensor]] = {}
    talk = 0.0
    for prompt, text in itertools.product(prompts, TURNS):
        row = int(re.search(r"(\d+) assistant", prompt)[1])
        logprobs = token_logprobs(start, prompt, f"{text} </s>")
        by_topic.setdefault(row % 4, []).append(logprobs)
        talk -= (len(set(text.split())) / 9 + LEVELS[row] / 8) * logprobs.mean().item() / 32
    spread = sum(torch.cat(group).var(correction=0).item() / 4 for group in by_topic.values())
    losses = [run.metrics["loss"] for run in dialogues]
    assert losses[1][1] - losses[0][1] == pytest.approx(0.1 * spread + 1.5 * talk, rel=1e-4)
    assert losses[1][2] < losses[1][1]


def test_there_is_no_value_loss_and_its_weight_is_zero(model, dialogues):
    """000, 001: value loss."""
    assert (dialogues[0].metrics.loc[1:, "grad_norm"] > 0).all()
    with pytest.raises(ConfigError, match=r"value_loss_coef = 0.5: there is no critic"):
        train("nowhere", loss={"value_loss_coef": 0.5})


def test_the_learning_rate_follows_the_performance_of_groups(dialogues):
    """000, 001: adaptive training."""
    for run, factor in zip(dialogues, (1.1, 0.9), strict=True):
        rates = run.metrics["learning_rate"]
        assert rates[1] == pytest.approx(1e-2) and rates[2] == pytest.approx(factor * rates[1])


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        ({"strategy": "semantic"}, r"semantic; formed before .*number 4, size_mean 2\b.*centroid_distance"),
        ({"strategy": "performance"}, r"formed after .*number 4,.*diversity.*2 prompts: mean reward -"),
        (ADAPTIVE, r"random, phase 1 of 3, until 0.3 of the run; .*number 4,"),
        ({"strategy": "random", "size_by": {"column": "side", "a": 2}}, r"2 prompts: side 'a', mean reward"),
    ],
)
def test_preview_counts_groups_before_training(model, capsys, groups, shown):
    """000, 001: debugging tips."""
    rows = [{"prompt": f"{TOPICS[place % 4]} ends {place}", "side": "ab"[place // 4]} for place in range(8)]
    settings = {"prompts_per_step": 8, "groups": PAIRS | groups, "rollout.max_completion_length": 4}
    preview(model, rows, {"reward": "length", "options": {"target": 3}}, settings, "--groups")
    said = capsys.readouterr().out
    assert re.search(shown, said, re.DOTALL) and said.count("\n2 prompts") == 4
    assert {*map(int, re.findall(r"row (\d+):", said))} == {*range(8)}


PAIRS_OF_TEXT = [
    {"prompt": f"{n} plus 2", "chosen": f"so {n + 2}", "rejected": "cats so"}
    | {"math_correctness": n % 2, "syntax_scores": n / 8}
    for n in range(8)
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


CORRECT = [2.0 * row["math_correctness"] for row in PAIRS_OF_TEXT]
SYNTAX = [row["syntax_scores"] for row in PAIRS_OF_TEXT]


@pytest.mark.parametrize(
    ("function", "columns", "first", "built_in"),
    [
        (plain, [], [0.0], 1.0),
        (mathematical, [], [0.0], 2.0),
        (with_syntax, ["syntax_scores"], SYNTAX, None),
        (with_correctness, ["math_correctness"], CORRECT, None),
    ],
)
def test_a_custom_loss_of_pairs_reads_log_ratios_and_columns(model, function, columns, first, built_in):
    """001: loss functions of DPO, domains, the complete example; training metrics, debugging."""
    run = compared(model, {"loss_type": function, "columns": columns})
    steps = run.metrics.loc[1:]
    at_zero = -logsigmoid(torch.tensor(first)).mean().item()  # the log-ratios of the first step
    assert steps["loss"][1] == pytest.approx(at_zero, rel=1e-4) and steps["loss"][2] < steps["loss"][1]
    gap = steps["rewards/chosen"] - steps["rewards/rejected"]
    assert gap.tolist() == pytest.approx(steps["rewards/margins"].tolist(), abs=1e-5) and gap[2] > 0
    assert steps["rewards/chosen_min"][2] <= steps["rewards/chosen"][2] <= steps["rewards/chosen_max"][2]
    if built_in:  # the standard implementation, by its beta
        same = compared(model, {"loss_type": "sigmoid", "beta": built_in}, output_dir="same")
        assert steps["loss"].tolist() == pytest.approx(same.metrics["loss"].tolist()[1:], rel=1e-4)


def fluency(scores: PairScores) -> torch.Tensor:
    """The mean negative log-probability of a chosen token."""
    return -scores.inputs.chosen_logprobs / scores.inputs.chosen_lengths


def coherence(scores: PairScores) -> torch.Tensor:
    """A metric of the row weighs the chosen completion."""
    return -scores.columns["syntax_scores"] * scores.chosen


def test_a_loss_of_pairs_is_the_weighted_sum_of_several_objectives(model):
    """001: multi-objective DPO."""
    objectives = {"loss_type": ["sigmoid", fluency, coherence], "loss_weights": [1.0, 0.1, 0.2]}
    run = compared(model, objectives | {"columns": ["syntax_scores"]})
    steps, start = run.metrics.loc[1:], start_of(model, run)
    parts = steps[["loss/sigmoid", "loss/fluency", "loss/coherence"]].to_numpy()
    assert steps["loss"].tolist() == pytest.approx((parts @ [1.0, 0.1, 0.2]).tolist(), rel=1e-5)
    chosen = [(f"user {row['prompt']} assistant", f"{row['chosen']} </s>") for row in PAIRS_OF_TEXT]
    fluent = -torch.stack([token_logprobs(start, *turn).mean() for turn in chosen]).mean().item()
    assert parts[0].tolist() == pytest.approx([math.log(2), fluent, 0], rel=1e-4, abs=1e-6)
    assert (parts[1] < parts[0]).all()


BOUNDED = {"min": 0.01, "max": 1.0}
ALWAYS_WIDE = {"below": -2.0, "above": -1.0}  # a gap that calls for less beta


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        ({"schedule": "linear", "final": 0.05}, [0.2, 0.05]),
        ({"band": {"below": 0.1, "above": 0.5}, **BOUNDED}, [0.2, 0.22]),
        ({"band": ALWAYS_WIDE, **BOUNDED}, [0.2, 0.18]),
    ],
)
def test_beta_follows_the_steps_or_the_reward_gap(model, beta, expected):
    """001: beta schedule, adaptive training of DPO."""
    run = compared(model, {"beta": 0.2}, preference={"beta": beta})
    steps = run.metrics.loc[1:]
    assert steps["beta"].tolist() == pytest.approx(expected)
    gaps = steps["rewards/margins"]
    assert gaps[1] == pytest.approx(0, abs=1e-6) and gaps[2] > 1e-3


def overflows(scores: PairScores) -> torch.Tensor:
    """Finite while policy and reference agree."""
    return scores.chosen + (1e6 * (scores.chosen - scores.rejected).abs()).exp()


def of_tokens_overflows(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-(inputs.advantages * inputs.logprobs).mean() / 0)


def test_a_loss_that_is_not_finite_ends_the_run_by_its_name(model):
    """001: validating losses."""
    with pytest.raises(ValueError, match=r"overflows.* returned a loss that is not finite; bound"):
        compared(model, {"loss_type": overflows})
    assert len(read_jsonl(Path("out/metrics.jsonl"))) == 2  # the step before the first, and the first
    with pytest.raises(ValueError, match=r"of_tokens_overflows.* returned a loss that is not finite"):
        train(model, loss={"loss_type": of_tokens_overflows}, output_dir="tokens")


@pytest.mark.parametrize("guide", GUIDES["files"], ids=lambda guide: guide["guide"])
def test_a_guides_file_trains_as_it_stands_and_says_what_became_of_it(model, guide, capsys):
    Path("mine.py").write_text(GUIDES["mine"])
    Path("guide.yaml").write_text(guide["text"].replace("{model}", model))
    write_rows("rows.jsonl", [{"question": f"{n} plus 2", "reference_answer": str(n + 2)} for n in range(4)])
    write_rows("prompts.jsonl", [{"prompt": f"cats {n}"} for n in range(8)])
    write_rows("pairs.jsonl", PAIRS_OF_TEXT)
    write_rows("ranked.json", RANKED)
    write_rows("held_out.json", [row | {"prompt": "7 plus 3"} for row in RANKED[:2]])
    given = ["train", "guide.yaml", *shlex.split(guide["missing"].replace("{model}", model))]

    code, printed = main([*given, "--print-config"]), capsys.readouterr()
    assert code == 0, printed.err
    found = flatten(yaml.safe_load(printed.out))
    assert guide["listed"] in printed.err
    found["dataset.source"] = Path(found["dataset.source"]).name
    for place, value in guide["expected"].items():
        assert found[place] == value, place
    small = ["model.dtype=float32", "output_dir=out", "logging.tensorboard=false"]
    if found["algorithm"] == "grpo":
        small += ["rollout.engine=transformers", "rollout.max_completion_length=8"]
    if found["algorithm"] == "rank":
        small += ["max_steps=2", "optimizer.warmup_steps=0"]
    assert main([*given, *small]) == 0, capsys.readouterr().err
    assert len(read_jsonl(Path("out/metrics.jsonl"))) == 3


def test_a_script_converts_into_a_run_that_trains(model, capsys):
    """004: the template; a whole script read without running it."""
    Path("script.py").write_text(GUIDES["template"].replace("{model}", model))
    write_rows("prompts.jsonl", [{"prompt": f"cats {n}"} for n in range(4)])

    assert main(["convert", "script.py", "-o", "run.yaml"]) == 0
    assert main(["train", "run.yaml", "model.dtype=float32"]) == 0

    records = read_jsonl(Path("out/metrics.jsonl"))
    assert len(records) == 3 and records[1]["reward/lively/mean"] > 0


def test_the_page_names_every_test_of_this_file_and_no_other():
    page = Path(__file__).parents[1].joinpath("docs/guides.md").read_text(encoding="utf-8")
    here = {name for name, value in globals().items() if name.startswith("test_") and callable(value)}
    assert {*re.findall(r"`(test_\w+)` \|", page)} == here - {
        "test_the_page_names_every_test_of_this_file_and_no_other"
    }
