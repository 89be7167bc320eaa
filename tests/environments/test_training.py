"""A run with an environment, from its configuration to its report: what each part makes of several turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_fast.cli import main
from grpo_fast.config import TrainConfig
from grpo_fast.run import train

OWN = '''
import threading


class Guess:
    """Numbers to guess."""

    def __init__(self) -> None:
        self.guessed, self.lock = [], threading.Lock()  # which no other rank can be sent

    def reset(self, start, **row):
        return f" w{start}" if start else None

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: one to four
        """
        if number > 4:
            raise ValueError("too large")
        self.guessed.append(number)
        return f"w{number}"

    async def get_reward(self) -> float:
        return float(3 in self.guessed)


def patience(completions, environments, **columns):
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [len(environment.guessed) / 10 for environment in environments]


def plain(engine, prompts, sampling):
    return [group[0] for group in engine.generate([p.token_ids for p in prompts], 1, sampling)]
'''
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
CALL = '<tool_call>{{"name": "guess", "arguments": {{"number": {}}}}}</tool_call>'


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random model in whose vocabulary a call is one token, so that it makes some."""
    folder = tmp_path_factory.mktemp("toy")
    words = ["<unk>", "guess", "w1", "w2", "w3", "w4"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.add_tokens([AddedToken(text, special=True) for text in ("<user>", "<assistant>", "<tool>")])
    fast.add_tokens([AddedToken(CALL.format(i), normalized=False) for i in range(1, 9)])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        tokens = {"vocab_size": len(fast), "eos_token_id": fast.eos_token_id, "bos_token_id": None}
        LlamaForCausalLM(LlamaConfig(**sizes, **tokens)).save_pretrained(folder / "model")
    rows = [{"prompt": f"w{1 + i % 4} w{1 + i % 3}", "start": i % 5} for i in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "held_out.jsonl").write_text("\n".join(json.dumps(row | {"start": 7}) for row in rows[:4]))
    (folder / "own.py").write_text(OWN)
    return {
        "max_steps": 2,
        "prompts_per_step": 2,
        "threads": 1,
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "dataset": {"source": str(folder / "rows.jsonl")},
        "rewards": [{"reward": f"{folder / 'own.py'}:patience"}],
        "rollout": {
            "environment": f"{folder / 'own.py'}:Guess",
            "num_generations": 4,
            "max_completion_length": 32,
            "max_turns": 4,
        },
        "evaluation": {"dataset": {"source": str(folder / "held_out.jsonl")}, "reward": "Guess", "every": 1},
        "logging": {"tensorboard": False, "samples_every": 1},
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def with_rollout(toy: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return toy | {"rollout": toy["rollout"] | changes}


@pytest.fixture(scope="module")
def finished(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TrainConfig(**toy, output_dir=str(tmp_path_factory.mktemp("run") / "run"))
    return train(config, display=False).run_dir


def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(toy, finished: Path, tmp_path: Path):
    stopped = TrainConfig(**toy, output_dir=str(tmp_path))
    train(stopped.model_copy(update={"max_steps": 1}), display=False)
    train(stopped, display=False, resume="latest")

    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        assert (finished / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_a_run_counts_turns_calls_and_tokens_of_the_model_and_keeps_its_clock_apart(finished: Path):
    metrics, timings, samples = (lines(finished / f"{n}.jsonl") for n in ("metrics", "timings", "samples"))

    assert metrics[1]["turns/mean"] > 1 and metrics[1]["tools/calls"] > 0 < metrics[1]["tools/failures"] < 1
    assert "reward/Guess/mean" in metrics[1] and "reward/patience/mean" in metrics[1]
    assert timings[0]["environment/seconds"] > 0 and "environment/seconds" not in metrics[1]
    for sample in samples:
        answers = [turn["content"] for turn in sample["messages"] if turn["role"] == "tool"]
        assert sample["rewards"]["Guess"] == 1.0 or "w3" not in answers
        assert sample["rewards"]["patience"] >= sum(answer[0] == "w" for answer in answers) / 10 - 1e-6


def test_people_read_who_said_what(finished: Path, toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = (finished / "report.html").read_text()
    assert '<span class="tag">tool guess</span>' in page and "guess(number=" in page

    out, config = tmp_path / "out.json", tmp_path / "run.yaml"
    assert main(["eval", str(finished), "--k", "1", "2", "--output", str(out)]) == 0
    assert "pass@2" in capsys.readouterr().out
    roles = {
        turn["role"] for q in json.loads(out.read_text())["questions"] for c in q["completions"] for turn in c
    }
    assert roles == {"assistant", "tool"}

    config.write_text(yaml.safe_dump(toy))
    assert main(["preview", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "\n  tool guess\n  | " in shown and "guess(number=" in shown and "Guess 0.000" in shown
