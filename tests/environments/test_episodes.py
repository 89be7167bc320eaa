"""Completions of several turns: what the model sees and learns from, token by token, and what ends them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.lookup import given
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.data import Prompt
from grpo_fast.data.dataset import prompts_of
from grpo_fast.environments import load_toolsets, make_rollout
from grpo_fast.environments.template import TurnTemplate
from grpo_fast.rollout import Completion, Requests, Rollout, Sampling
from tests.environments.conftest import END, ScriptedEngine

TURNS = 400  # of random text
SAMPLING = Sampling(max_completion_length=400, seed=3)


def look_up(key: str, times: int = 1) -> str:
    """Look something up.

    Args:
        key: what to look up
        times: how often
    """
    if key == "bad":
        raise LookupError("there is no bad key")
    if key == "exit":
        sys.exit("enough")
    if key == "slow":
        time.sleep(5)
    return f"[{key}]" * times


async def wait_for(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    if seconds < 0:
        sys.exit("no time")
    await asyncio.sleep(seconds)
    return "waited"


class Game:
    def reset(self, **row: Any) -> str | None:
        self.log: list[Any] = [row]
        return row.get("begin")

    def guess(self, word: str) -> int:
        """Guess a word.

        Args:
            word: the guess
        """
        self.log.append(word)
        return len(self.log)

    async def get_reward(self) -> float:
        return float(len(self.log))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def rollout_of(tokenizer, rows=({"prompt": "Who?"},), **settings: Any) -> tuple[Rollout, list[Prompt]]:
    config = RolloutConfig(**settings)
    toolsets = load_toolsets(config)
    assert toolsets is not None
    prompts = prompts_of(rows, DatasetConfig(source="rows"), tokenizer, toolsets.schemas)
    return make_rollout(config, toolsets, tokenizer, [END]), list(prompts)


def speaking(tokenizer, *turns: str) -> ScriptedEngine:
    """Every completion says these turns, one after another; the last again and again."""

    def say(context: Sequence[int]) -> list[int]:
        said = str(tokenizer.decode(list(context))).count("<|im_start|>assistant\n") - 1
        return [*tokenizer(turns[min(said, len(turns) - 1)], add_special_tokens=False)["input_ids"], END]

    return ScriptedEngine(say)


def play(
    tokenizer, turns: Sequence[str], *, rows=({"prompt": "Who?"},), n=1, sampling=SAMPLING, **settings: Any
) -> tuple[list[list[Completion]], ScriptedEngine, list[Prompt]]:
    rollout, prompts = rollout_of(tokenizer, rows, **settings)
    engine = speaking(tokenizer, *turns)
    return rollout(engine, prompts, n, sampling), engine, prompts


def paths(**objects: Any) -> Any:
    return given({f"m:{name}": value for name, value in objects.items()})


def test_the_model_sees_the_conversation_and_trains_on_its_own_tokens(tokenizer) -> None:
    turns = [call("guess", word="äpfel") + call("look_up", key="k", times=2), "It is [k]."]
    with paths(look_up=look_up, Game=Game):
        rows = [{"prompt": "Who?", "begin": " Guess!", "answer": 4}]
        ((one, two),), engine, (prompt,) = play(
            tokenizer, turns, rows=rows, n=2, tools=["m:look_up"], environment="m:Game"
        )
    episode = one.episode
    assert episode.prompt == [{"role": "user", "content": "Who? Guess!"}]
    seen = str(tokenizer.decode(list(episode.prompt_ids + one.token_ids)))
    tools = str(tokenizer.decode(list(prompt.token_ids)))
    assert seen.startswith(tools[: tools.index("Who?")] + "Who? Guess!<|im_end|>\n<|im_start|>assistant\n")
    assert '"description": "how often"' in tools
    results = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in ("2", "[k][k]"))
    assert seen.endswith(
        f"{turns[0]}<|im_end|>\n<|im_start|>user{results}<|im_end|>\n"
        "<|im_start|>assistant\nIt is [k].<|im_end|>"
    )
    drawn = [token for _, _, ids in engine.served[::2] for token in ids]
    own = [*compress(one.token_ids, episode.sampled)]
    assert own == drawn
    assert one.num_sampled == len(drawn)
    assert [p < 0 for p in one.logprobs] == [*episode.sampled]
    roles = ["assistant", "tool", "tool", "assistant"]
    assert [message["role"] for message in episode.messages] == roles
    assert [m["content"] for m in episode.messages] == ["", "2", "[k][k]", "It is [k]."]
    assert episode.turns == 2
    assert (episode.tool_calls, episode.tool_failures) == (2, 0)
    assert episode.environment.log == [
        {"begin": " Guess!", "answer": 4, "prompt": [{"role": "user", "content": "Who?"}]},
        "äpfel",
    ]
    assert episode.environment is not two.episode.environment
    assert episode.reward == 2.0
    assert not one.truncated
    assert len({sampling.seed for _, sampling, _ in engine.served}) == 4  # turns and completions draw apart


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("look_up", key="bad"), "there is no bad key"),
        (call("look_up", key="exit"), "enough"),
        (call("wait_for", seconds=-1), "no time"),
        ('<tool_call>\n{"name": "look_up"}\n</tool_call>', "required positional argument: 'key'"),
        (call("look_op", key="x"), "did you mean 'look_up'"),
        (call("look_up", key="slow"), "no answer within 0.2 seconds"),
        (call("wait_for", seconds=5), "no answer within 0.2 seconds"),
    ],
)
def test_a_call_that_fails_or_hangs_answers_the_model_with_why(tokenizer, said: str, told: str) -> None:
    tools, timeout = ["m:look_up", "m:wait_for"], 0.2 if told.startswith("no answer") else 60.0
    with paths(look_up=look_up, wait_for=wait_for):
        ((one,),), *_ = play(tokenizer, [said, "Oh."], tools=tools, tool_timeout=timeout)
    assert told in one.episode.messages[1]["content"]
    assert one.episode.messages[1]["content"].startswith("{'error': ")
    assert (one.episode.tool_calls, one.episode.tool_failures) == (1, 1)
    assert one.episode.tools_given_up == told.startswith("no answer within")
    assert one.episode.messages[2]["content"] == "Oh."


def test_turns_calls_and_tokens_have_limits(tokenizer) -> None:
    def played(**settings: Any) -> Completion:
        with paths(look_up=look_up):
            ((one,),), *_ = play(tokenizer, [call("look_up", key="x")], tools=["m:look_up"], **settings)
        assert one.episode.messages[-1]["role"] == "assistant"  # nothing that no turn follows
        assert one.episode.sampled[-1]
        return one

    three = played(max_turns=3)
    assert (three.episode.turns, three.episode.tool_calls, three.truncated) == (3, 2, True)
    two = played(max_tool_calls=2)
    assert (two.episode.turns, two.episode.tool_calls, two.truncated) == (3, 2, True)
    for room in (60, 61, 62, 150):
        short = played(sampling=Sampling(max_completion_length=room, seed=1))
        assert short.truncated
        assert len(short.token_ids) <= room


def test_what_reset_says_counts_and_must_leave_room(tokenizer) -> None:
    rows = [{"prompt": "", "begin": "x y z " * 20}]
    with paths(Game=Game):
        ((one,),), _, (prompt,) = play(tokenizer, ["Fine."], rows=rows, environment="m:Game")
        longer = len(one.episode.prompt_ids) - len(prompt.token_ids)
        full = Sampling(max_completion_length=longer, seed=1)
        with pytest.raises(
            ValueError, match=rf"= {longer} leaves no room: Game.reset made .* {longer} tokens"
        ):
            play(tokenizer, ["Fine."], rows=rows, environment="m:Game", sampling=full)


class Blocks:
    def reset(self, begin: Any, **row: Any) -> Any:
        return begin

    def look(self, image: bool) -> list[dict[str, str]]:
        """Look.

        Args:
            image: also at the picture
        """
        seen = [{"type": "text", "text": "a "}, {"type": "text", "text": "door"}]
        return [*seen, {"type": "image", "image": "..."}] if image else seen


def test_blocks_of_text_are_joined_and_what_is_no_text_is_refused(tokenizer) -> None:
    rows = [
        {"prompt": "Who?", "begin": [{"type": "text", "text": " It"}, {"type": "text", "text": " begins."}]}
    ]
    with paths(Blocks=Blocks):
        ((one,),), *_ = play(tokenizer, [call("look", image=False), "."], rows=rows, environment="m:Blocks")
        assert one.episode.prompt[-1]["content"] == "Who? It begins."
        assert one.episode.messages[1]["content"] == "a door"
        with pytest.raises(RuntimeError, match=r"the tool look returned a block of type 'image'.* only text"):
            play(tokenizer, [call("look", image=True), "."], rows=rows, environment="m:Blocks")
        for given in (5, ["a"]):
            rows = [{"prompt": "Who?", "begin": given}]
            with pytest.raises(RuntimeError, match=r"Blocks.reset returned .* for row 0: return text"):
                play(tokenizer, ["."], rows=rows, environment="m:Blocks")


def test_rows_choose_among_environments_and_see_the_tools_of_their_own(tokenizer) -> None:
    class Shop(Game):
        def buy(self, thing: str) -> str:
            """Buy.

            Args:
                thing: what
            """
            return f"bought {thing}"

    rows = [{"prompt": "a", "environment": "shop"}, {"prompt": "b", "environment": "game"}]
    with paths(Game=Game, Shop=Shop):
        settings = {"environment": {"game": "m:Game", "shop": "m:Shop"}}
        groups, _, prompts = play(tokenizer, [call("buy", thing="tea"), "."], rows=rows, **settings)
        told = ['"name": "buy"' in tokenizer.decode(list(prompt.token_ids)) for prompt in prompts]
        assert told == [True, False]
        answers = [group[0].episode.messages[1]["content"] for group in groups if group[0].episode]
        assert answers[0] == "bought tea"
        assert "there is no tool 'buy'" in answers[1]
        assert "environment" not in groups[0][0].episode.environment.log[0]
        with pytest.raises(ValueError, match=r"has 'shp'.*did you mean 'shop'"):
            play(tokenizer, ["."], rows=[{"prompt": "a", "environment": "shp"}], **settings)


class Broken(Game):
    def reset(self, **row: Any) -> None:
        raise OSError("no route")


class Unpaid(Game):
    def get_reward(self) -> float:  # type: ignore[override]
        return float("nan")


class Speechless:
    def guess(self, word: str) -> None:
        """Guess."""


def bare(key) -> str:
    """Bare."""
    return key


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"environment": "m:Broken"}, RuntimeError, r"reset for row 0 \(OSError: no route, at .*episodes.py"),
        ({"environment": "m:Unpaid"}, RuntimeError, r"Unpaid.get_reward returned nan"),
        ({"environment": "m:Speechless"}, ValueError, r"'m:Speechless' needs a method reset"),
        ({"tools": ["m:bare"]}, ValueError, r"the tool bare has no schema .*give every argument"),
    ],
    ids=["Broken", "Unpaid", "Speechless", "bare"],
)
def test_a_broken_environment_or_tool_ends_the_rollout(tokenizer, settings, error, message: str) -> None:
    objects = {kind.__name__: kind for kind in (Broken, Unpaid, Speechless, bare)}
    with paths(**objects), pytest.raises(error, match=message):
        play(tokenizer, ["."], n=3, **settings)


def test_an_error_of_the_engine_ends_every_completion(tokenizer) -> None:
    def fail(context: Sequence[int]) -> list[int]:
        raise FloatingPointError("diverged")

    with paths(look_up=look_up):
        rollout, prompts = rollout_of(tokenizer, tools=["m:look_up"])
    with pytest.raises(FloatingPointError, match="diverged"):
        rollout(ScriptedEngine(fail), prompts, 2, SAMPLING)
    ((one,),) = rollout(ScriptedEngine(lambda _: [5, END]), prompts, 1, SAMPLING)
    assert one.token_ids == (5, END)


def test_no_token_of_the_model_is_ever_made_anew(tokenizer, seed: int) -> None:
    """Random turns and random answers; a decoded turn is often tokenized to something else."""
    source, turns, anew = random.Random(seed), 0, 0
    alphabet = "abc the answer<tool_response>\n\"'{}\\ äß漢\U0001f600\u200b\r\t"

    def noise() -> str:
        """Noise."""
        return "".join(source.choices(alphabet, k=source.randrange(30)))

    def say(context: Sequence[int]) -> list[int]:
        drawn = [source.randrange(END + 1, len(tokenizer)) for _ in range(source.randrange(12))]
        asked = call("noise") if source.random() < 0.95 else ""
        return [*drawn, *tokenizer(asked, add_special_tokens=False)["input_ids"], END]

    with paths(noise=noise):
        rollout, prompts = rollout_of(tokenizer, tools=["m:noise"], max_turns=50)
    while turns < TURNS:
        engine = ScriptedEngine(say)
        ((one,),) = rollout(engine, prompts, 1, Sampling(max_completion_length=10**6, seed=seed))
        whole = one.episode.prompt_ids + one.token_ids
        assert all(whole[: len(context)] == context for context, _, _ in engine.served)
        said = [ids for _, _, ids in engine.served]
        assert [*compress(one.token_ids, one.episode.sampled)] == [token for ids in said for token in ids]
        again = [
            tokenizer(tokenizer.decode(list(ids)), add_special_tokens=False)["input_ids"] for ids in said
        ]
        anew += sum(ids != list(kept) for ids, kept in zip(again, said, strict=True))
        turns += len(said)
    assert anew > turns / 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: "", "the tokenizer has none"),
        (lambda t: t.replace("{{ call.function.arguments | tojson }}", "{}"), "arguments of calls"),
        (lambda t: t.replace("{{ message.content }}\n</tool_re", "</tool_re"), "calls and their results"),
        (lambda t: t.replace("<|im_end|>", "<|endoftext|>"), "none of the tokens that end generation"),
        (lambda t: t.replace("<tool_call>", "<<call>>"), "is none of: JSON in <tool_call>"),
        (lambda t: "{{ raise_exception('no roles') }}" + t, "refuses the roles user, assistant, tool"),
        (lambda t: "{{ messages | length }}" + t, "changes a question once it is answered"),
        (
            lambda t: "{% if messages | length > 1 %}{{ 'x' * 30000000 }}{% endif %}" + t,
            "a macro without end",
        ),
    ],
)
def test_a_template_that_cannot_go_on_is_refused_with_the_reason(
    tokenizer, change: Callable[[str], str], reason: str
) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = change(tokenizer.chat_template)
    config = RolloutConfig(tools=["m:look_up"])
    with paths(look_up=look_up), pytest.raises(ValueError, match=reason):
        make_rollout(config, load_toolsets(config), other, [END])


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "nemotron_3_nano"])
def test_the_templates_of_the_field_go_on_as_they_write_the_whole(tokenizer, family: str) -> None:
    trl = pytest.importorskip("trl")
    other = copy.deepcopy(tokenizer)
    other.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text()
    other.add_special_tokens({"additional_special_tokens": ["<|eot_id|>", "<|start_header_id|>"]})
    ends = [END, other.convert_tokens_to_ids("<|eot_id|>")]
    with paths(look_up=look_up):
        toolsets = load_toolsets(RolloutConfig(tools=["m:look_up"]))
    template = TurnTemplate(other, ends, toolsets.by_name[None].schemas)
    asked = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "k", "times": 2}}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [asked]}]
    answer = {"role": "tool", "name": "look_up", "content": "result"}
    whole = other.apply_chat_template([*turns, answer], tokenize=False, add_generation_prompt=True)
    assert whole.endswith(other.decode(list(template.after([answer]))))
    begun = other.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    turn = whole[whole.index("?") :].split("assistant", 1)[1].split(str(other.decode([template.end_id])))[0]
    own = turn[turn.index("{" if family == "llama3_1" else "<tool_call>") :]
    thought = "</think>" if begun.rstrip().endswith("<think>") else ""
    parsed = template.parse([*other(thought + own, add_special_tokens=False)["input_ids"], template.end_id])
    assert parsed["tool_calls"][0]["function"] == asked["function"]


def test_a_rank_without_prompts_serves_with_the_others(tokenizer) -> None:
    with paths(look_up=look_up):
        rollout, _ = rollout_of(tokenizer, tools=["m:look_up"])
    served: list[Requests] = []
    engine = SimpleNamespace(serve=lambda requests: served.append(requests) or requests.take("all"))
    assert rollout(engine, [], 2, SAMPLING) == []
    assert len(served) == 1


class Session:
    """A client as OpenEnv's: its connection holds one of the server's few sessions until it is closed."""

    server: ClassVar[set[Session]] = set()

    def connect(self) -> None:
        self.server.add(self)
        assert len(self.server) <= 4, "the server has no more sessions"

    async def close(self) -> None:
        self.server.discard(self)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class Guided:
    """As TRL's guide writes it: the client is made with the instance, and nothing closes it."""

    def __init__(self) -> None:
        self.client = Session()

    def reset(self, **row: Any) -> str:
        self.client.connect()
        self.done = False
        return " Look it up."

    def look(self, key: str) -> str:
        """Look.

        Args:
            key: where
        """
        assert not self.done, "it is reset for each completion"
        self.done = True
        if key == "slow":
            time.sleep(5)
        return key

    def get_reward(self) -> float:
        return float(self.done)


def test_instances_are_made_once_reset_for_each_completion_and_closed(tokenizer) -> None:
    with paths(Guided=Guided):
        rollout, prompts = rollout_of(tokenizer, environment="m:Guided")

    played = []
    for _ in range(3):
        ((*completions,),) = rollout(speaking(tokenizer, call("look", key="x"), "Yes."), prompts, 4, SAMPLING)
        assert [c.episode.reward for c in completions] == [1.0] * 4
        played.append([c.episode.environment for c in completions])
    assert len({id(one) for one in played[0]}) == 4 and played[0] == played[1] == played[2]

    assert len(Session.server) == 4
    del rollout
    assert not Session.server


def test_an_instance_that_a_call_still_works_on_plays_no_more(tokenizer) -> None:
    with paths(Guided=Guided):
        rollout, prompts = rollout_of(tokenizer, environment="m:Guided", tool_timeout=1.0)

    engine = speaking(tokenizer, call("look", key="slow"), "Oh.")
    ((one,),), ((two,),) = (rollout(engine, prompts, 1, SAMPLING) for _ in range(2))
    assert one.episode.tools_given_up == 1
    assert one.episode.environment is not two.episode.environment
