"""One environment, in TRL's GRPOTrainer and here: what the model and the rewards see is the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", minversion="1.16", reason="pip install --no-deps 'trl~=1.16.0'")

import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import grpo_fast
from grpo_fast.examples.calculator import Calculator
from grpo_fast.rollout import Completion
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.transformers import TransformersEngine


class Ledger:
    def reset(self, start: int, **row: Any) -> str:
        self.sum = start
        return f" You begin with {start}."

    async def add(self, number: int) -> int:
        """Add to the sum.

        Args:
            number: what is added
        """
        self.sum += number
        return self.sum

    def get_reward(self) -> float:
        return float(self.sum)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TWO_CALLS = f"{call('calculate', expression='12 * 34')}\n{call('calculate', expression='2 ** 3')}"
SAYS: dict[type, dict[int, str]] = {  # the model, by the number of answers that it has seen
    Ledger: {0: f"I add.\n{call('add', number=4)}", 1: call("add", number="four"), 2: "It is 6."},
    Calculator: {0: TWO_CALLS, 2: call("calculate", expression="408 + 1"), 3: "409"},
}
METRICS = {  # entropy and length are of the tokens that the model wrote
    "entropy": "entropy",
    "completion/length_mean": "completions/mean_length",
    "tools/calls": "tools/call_frequency",
    "tools/failures": "tools/failure_frequency",
    "reward/mean": "reward",  # with the environment's own
}
ROWS = [{"prompt": [{"role": "user", "content": "Add it up."}], "start": 2}] * 2


class Seen:
    """What a trainer has shown the model and a reward."""

    def __init__(self, tokenizer: Any, says: dict[int, str]) -> None:
        self.tokenizer, self.says = tokenizer, says
        self.turns: dict[str, list[int]] = {}  # the ids before each turn, by their text
        self.rewarded: list[Any] = []

    def say(self, ids: Any) -> list[int]:
        text = self.tokenizer.decode(ids)
        self.turns[text] = list(ids)
        return list(self.tokenizer(f"{self.says[text.count('<tool_response>')]}<|im_end|>")["input_ids"])

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, environments: Any, **row: Any):
        states = [vars(environment) for environment in environments]
        self.rewarded = [prompts, completions, [list(ids) for ids in completion_ids], states, row["start"]]
        return [0.0, 1.0]


def in_trl(seen: Seen, environment: type, folder: str, out: Path) -> dict[str, float]:
    class Scripted(trl.GRPOTrainer):  # type: ignore[name-defined,misc]
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            return [seen.say(ids) for ids in prompt_ids], None

    settings = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 400}
    settings |= {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    trainer = Scripted(
        model=folder,
        args=trl.GRPOConfig(output_dir=str(out), **settings),
        train_dataset=Dataset.from_list(ROWS),
        reward_funcs=[seen.reward],
        environment_factory=environment,
        processing_class=seen.tokenizer,
    )
    trainer.train()
    return dict(trainer.state.log_history[0])


def here(seen: Seen, environment: type, folder: str, out: Path) -> dict[str, float]:
    def serve(_: Any, requests: Requests) -> None:
        while (taken := requests.take("all")) is not None:
            for request in taken:
                ids = tuple(seen.say(request.token_ids))
                requests.give(request, Completion(ids, (0.0,) * len(ids), "", False))

    settings = {"prompts_per_step": 1, "max_steps": 1, "logging": {"tensorboard": False}, "display": False}
    settings |= {"alerts": {"sampler_drift": None}}  # what is scripted is of no policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "serve", serve)
        run = grpo_fast.train(
            model={"path": folder, "device": "cpu", "dtype": "float32"},
            dataset=ROWS,
            rewards=seen.reward,
            rollout={"environment": environment, "num_generations": 2, "max_completion_length": 400},
            output_dir=str(out),
            **settings,
        )
    return dict(run.metrics.iloc[-1])


@pytest.mark.parametrize("environment", SAYS)
def test_an_environment_shows_the_same_in_trl_and_here(
    environment: type, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(tokenizer)  # TRL adds a response template to it
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen2_5.jinja").read_text("utf-8")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    tokenizer.save_pretrained(tmp_path)
    LlamaForCausalLM(LlamaConfig(**sizes, **tokens)).save_pretrained(tmp_path)
    theirs, ours = (Seen(tokenizer, SAYS[environment]) for _ in range(2))

    in_theirs = in_trl(theirs, environment, str(tmp_path), tmp_path / "theirs")
    in_ours = here(ours, environment, str(tmp_path), tmp_path / "ours")

    assert ours.turns == theirs.turns and len(ours.turns) == 3
    assert "{'error': " in list(ours.turns)[-1]
    assert ours.rewarded == theirs.rewarded
    for name, their_name in METRICS.items():
        assert in_ours[name] == pytest.approx(in_theirs[their_name], rel=1e-4), name
