"""Training on an environment of the verifiers library, written as its users write them."""

from __future__ import annotations

import itertools
import string
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

pytest.importorskip("verifiers.v1")
from grpo_fast.environments.renderer import TurnRenderer, TurnRendererConfig
from grpo_fast.environments.template import TurnTemplate
from grpo_fast.environments.verifiers import VerifiersRollout

# Its harness asks in this process: the library's own programs start an interpreter each.
ENVIRONMENT = """
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

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
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                except openai.BadRequestError:
                    break
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Chat", "Tasks"]
"""
# `ay` is two letters at once, and text of it is read as one token or as two.
WORDS = "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response>"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "letters_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    return "verifiers:letters-env"


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


def test_what_trains_is_what_was_sampled_turn_by_turn(source, policy, seed, monkeypatch):
    asked = []
    ask = Requests.ask

    def spied(self, token_ids, sampling):
        asked.append((token_ids, answer := ask(self, token_ids, sampling)))
        return answer

    monkeypatch.setattr(Requests, "ask", spied)
    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids)
    dataset = DatasetConfig(source=source, max_prompt_length=50)
    prompts = load_prompts(dataset, policy.tokenizer)
    rollout = VerifiersRollout(dataset, policy.tokenizer, policy.eos_token_ids)
    groups, again = (rollout(engine, prompts, 3, Sampling(120, seed=seed)) for _ in range(2))
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in g] for g in again]
    assert (rollout.retokenised, rollout.left_out) == (0, 0)
    answers = [(tuple(prompt), future.result()) for prompt, future in asked]
    drawn = {(prompt, answer.token_ids, answer.logprobs) for prompt, answer in answers}
    for completion in (completion for group in groups for completion in group):
        episode, at = completion.episode, 0
        whole, n = episode.prompt_ids + completion.token_ids, len(episode.prompt_ids)
        for own, run in itertools.groupby(episode.sampled):
            end = at + len([*run])
            if own:  # a turn, as the engine drew it after all that stands before it
                ids, logprobs = completion.token_ids[at:end], completion.logprobs[at:end]
                assert (whole[: n + at], ids, logprobs) in drawn
            at = end
        assert episode.turns > 1 or completion.truncated
        assert at == len(completion.token_ids) <= 120 and own
        assert episode.reward == episode.environment.trace.reward is not None


def test_turns_that_a_renderer_writes_in_other_tokens_are_counted(source, policy, seed, caplog):
    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=[2])
    options = {"renderer": {"name": "default"}, "taskset": {"letters": "aby"}}
    dataset = DatasetConfig(source=source, size=2, max_prompt_length=50, options=options)
    prompts = load_prompts(dataset, policy.tokenizer)
    rollout = VerifiersRollout(dataset, policy.tokenizer, [2])
    for step in range(9):  # `ay` comes by chance
        rollout(engine, prompts, 4, Sampling(160, seed=seed + step))
        if rollout.retokenised:
            break
    assert rollout.retokenised and rollout.left_out and "other tokens" in caplog.text


def test_our_renderer_reads_calls_and_goes_on_after_them_without_touching_what_was_sampled(tokenizer):
    properties = {"type": "object", "properties": {"key": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": properties}}]
    renderer = TurnRenderer(tokenizer, TurnRendererConfig(end_ids=(2,)))
    asked = renderer.render(
        [{"role": "user", "content": "?"}], tools=tools, add_generation_prompt=True
    ).token_ids
    text = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'
    said = [token for letter in text for token in tokenizer(letter)["input_ids"]]  # never so from the text
    (called,) = renderer.parse_response([*said, 2], tools=tools).tool_calls
    assert (called.name, called.arguments) == ("look", {"key": "a"})
    answer = {"role": "tool", "tool_call_id": "x", "name": "look", "content": "42"}
    after = TurnTemplate(tokenizer, [2], tools).after([answer])
    for sampled in ([*said, 2], said):  # a turn that was cut off is ended first
        bridged = renderer.bridge_to_next_turn(asked, sampled, [answer], tools=tools)
        assert bridged.token_ids == [*asked, *said, 2, *after]


def test_a_step_trains_on_an_environment_and_its_own_reward(source, policy, tmp_path):
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model"), "device": "cpu", "dtype": "float32"},
            "dataset": {"source": source, "max_prompt_length": 50},
            "rollout": {"num_generations": 4, "max_completion_length": 90},
            "output_dir": str(tmp_path / "run"),
            "prompts_per_step": 2,
            "micro_batch_tokens": 512,
            "max_steps": 1,
        }
    )
    trainer = build_trainer(config)
    assert "agent by the harness letters-env in subprocess" in trainer.rollout_fn.described
    before = {name: weight.clone() for name, weight in trainer.policy.trainable().items()}
    with trainer.engine:
        metrics = trainer.train_step().metrics
    assert trainer.rewards.names == ("Verifiers",) and metrics["reward/mean"] >= 0, sorted(metrics)
    assert any(not before[name].equal(weight) for name, weight in trainer.policy.trainable().items())


def test_a_module_of_before_v1_is_told_which_version_it_needs(policy, tmp_path: Path, monkeypatch):
    (tmp_path / "old_env.py").write_text("def load_environment(**options): ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"before v1, with load_environment; .* 0.4 or newer"):
        load_prompts(DatasetConfig(source="verifiers:old-env"), policy.tokenizer)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"source": "verifiers:no-such-env"}, "no_such_env"),
        ({"options": {"agent": {"max_turn": 3}}}, "max_turn"),
        ({"options": {"agent": {"runtime": {"type": "prime"}}}}, "subprocess or docker"),
    ],
    ids=["environment", "option", "runtime"],
)
def test_a_wrong_setting_is_refused_before_anything_runs(source, policy, changed, told):
    with pytest.raises(ValueError, match=told):
        load_prompts(DatasetConfig(**{"source": source, **changed}), policy.tokenizer)
