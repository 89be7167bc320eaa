"""Training on an environment of the verifiers library, written as its users write them."""

from __future__ import annotations

import string
from collections.abc import Callable
from itertools import compress, groupby, pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data import load_prompts
from grpo_fast.policy import Policy, load_policy
from grpo_fast.rollout import Requests, Sampling
from grpo_fast.rollout.transformers import TransformersEngine
from grpo_fast.run import build_trainer
from tests.environments.conftest import END, ScriptedEngine

pytest.importorskip("verifiers.v1")
from grpo_fast.environments.verifiers import VerifiersRollout

# Its harness asks in this process: the library's own programs start an interpreter each.
ENVIRONMENT = """
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

TOOLS = openai.NOT_GIVEN

class Letters(vf.TaskData):
    wanted: str

class Count(vf.Task[Letters]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return text.count(self.data.wanted) / max(1, len(text))

class Config(vf.TasksetConfig):
    letters: str = "ab"

class Tasks(vf.Taskset[Count, Config]):
    def load(self):
        for letter in self.config.letters:
            yield Count(Letters(prompt=f"say {letter}", wanted=letter), self.config.task)

class Chat(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for turn in range(4):
                try:
                    answer = await client.chat.completions.create(
                        model=ctx.model, messages=messages, tools=TOOLS
                    )
                except openai.BadRequestError:
                    break
                said = answer.choices[0].message
                results = [
                    {"role": "tool", "tool_call_id": call.id, "content": "found " + call.function.arguments}
                    for call in said.tool_calls or ()
                ]
                messages += [said.model_dump(), *(results or [{"role": "user", "content": "more"}])]
        return ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Chat", "Tasks"]
"""
# `ay` is two letters at once, and text of it is read as one token or as two.
WORDS = "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response>"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The source of `ENVIRONMENT`, in which one text may be replaced by another."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(old: str = "", new: str = "") -> str:
        name = f"letters_{tmp_path.name}_env"  # a module is imported once
        (tmp_path / f"{name}.py").write_text(ENVIRONMENT.replace(old, new) if old else ENVIRONMENT)
        return f"verifiers:{name.replace('_', '-')}"

    return write


@pytest.fixture
def policy(tmp_path: Path, seed: int) -> Policy:
    special = [*WORDS.split(), "<think>", "</think>"]
    letters = ["\n", " ", "ay", *string.ascii_lowercase]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate((*special, *letters))}, []))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=special,
        chat_template="{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=len(tokenizer), initializer_range=0.2))
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return load_policy(ModelConfig(path=str(tmp_path / "model"), device="cpu", dtype="float32"))


def test_what_trains_is_what_was_sampled_turn_by_turn(environment, policy, seed, monkeypatch):
    asked = []
    ask = Requests.ask

    def spied(self, token_ids, sampling):
        asked.append((token_ids, answer := ask(self, token_ids, sampling)))
        return answer

    monkeypatch.setattr(Requests, "ask", spied)
    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids)
    dataset = DatasetConfig(source=environment(), max_prompt_length=50)
    prompts = load_prompts(dataset, policy.tokenizer)
    rollout = VerifiersRollout(dataset, policy.tokenizer, policy.eos_token_ids)
    groups, again = (rollout(engine, prompts, 3, Sampling(120, seed=seed)) for _ in range(2))
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in g] for g in again]
    assert rollout._left_out == 0
    answers = [(tuple(prompt), future.result()) for prompt, future in asked]
    drawn = {(prompt, answer.token_ids, answer.logprobs) for prompt, answer in answers}
    for completion in (completion for group in groups for completion in group):
        episode, at = completion.episode, 0
        whole, n = episode.prompt_ids + completion.token_ids, len(episode.prompt_ids)
        for own, run in groupby(episode.sampled):
            end = at + len([*run])
            if own:  # a turn, as the engine drew it after all that stands before it
                ids, logprobs = completion.token_ids[at:end], completion.logprobs[at:end]
                assert (whole[: n + at], ids, logprobs) in drawn
            at = end
        assert episode.turns > 1 or completion.truncated
        assert at == len(completion.token_ids) <= 120 and own
        assert episode.reward == episode.environment.trace.reward is not None


def test_a_harness_that_rewrites_its_context_trains_one_branch(environment, policy, seed, caplog):
    forgets = "if turn % 2:\n                    messages = messages[-1:]\n                try:"
    dataset = DatasetConfig(source=environment("try:", forgets), size=1, max_prompt_length=50)
    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids)
    rollout = VerifiersRollout(dataset, policy.tokenizer, policy.eos_token_ids)
    ((one, *_),) = rollout(engine, load_prompts(dataset, policy.tokenizer), 4, Sampling(90, seed=seed))
    assert one.episode.turns <= 2 and one.episode.reward is not None
    assert "sampled tokens are not trained" in caplog.text


def test_calls_are_answered_and_sampled_tokens_stay(environment, tokenizer):
    schema = {"type": "object", "properties": {"key": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": schema}}
    source = environment("openai.NOT_GIVEN", repr([tool]))
    dataset = DatasetConfig(source=source, size=1, max_prompt_length=500)
    text = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'
    letters = [token for letter in text for token in tokenizer(letter)["input_ids"]]  # never so from the text
    called = [*letters, END]
    engine, rollout = ScriptedEngine(lambda _: called), VerifiersRollout(dataset, tokenizer, [END])
    ((one,),) = rollout(engine, load_prompts(dataset, tokenizer), 1, Sampling(900, seed=0))
    answers = [message for message in one.episode.messages if message["role"] == "tool"]
    assert [answer["content"] for answer in answers] == ['found {"key": "a"}'] * 3
    assert one.episode.tool_calls == 4
    assert [*compress(one.token_ids, one.episode.sampled)] == called * 4
    asked = [prompt for prompt, _, _ in engine.served]
    assert all(after[: len(before) + len(called)] == (*before, *called) for before, after in pairwise(asked))


def test_a_step_trains_on_an_environment_and_its_own_reward(environment, policy, tmp_path):
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model"), "device": "cpu", "dtype": "float32"},
            "dataset": {"source": environment(), "max_prompt_length": 50},
            "rollout": {"num_generations": 4, "max_completion_length": 90},
            "output_dir": str(tmp_path / "run"),
            "prompts_per_step": 2,
            "micro_batch_tokens": 512,
            "max_steps": 1,
        }
    )
    trainer = build_trainer(config)
    assert "letters" in trainer.rollout_fn.described
    before = {name: weight.clone() for name, weight in trainer.policy.trainable().items()}
    with trainer.engine:
        metrics = trainer.train_step().metrics
    assert trainer.rewards.names == ("Verifiers",) and metrics["reward/mean"] >= 0, sorted(metrics)
    assert any(not before[name].equal(weight) for name, weight in trainer.policy.trainable().items())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"source": "verifiers:no-such-env"}, "no_such_env"),
        ({"options": {"agent": {"max_turn": 3}}}, "max_turn"),
        ({"options": {"agent": {"runtime": {"type": "prime"}}}}, "subprocess or docker"),
        ({"options": {"renderer": {"name": "default"}}}, "renderer was removed: model.chat_template"),
    ],
    ids=["environment", "option", "runtime", "renderer"],
)
def test_a_wrong_setting_is_refused_before_anything_runs(environment, policy, changed, told):
    with pytest.raises(ValueError, match=told):
        load_prompts(DatasetConfig(**{"source": environment(), **changed}), policy.tokenizer)
