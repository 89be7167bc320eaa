"""`python -m benchmarks turns`: a rollout of several turns, whose tools take no time or half a second.

The model's weights are random, and a script says where its turns end: each completion has two or three, of
lengths of their own, and calls a tool between them, so that all rollouts decode as much. What vLLM has cached
is dropped after each rollout, as by an optimizer step. `one_by_one_seconds` is computed: of a trainer that
decodes as fast, waits for all completions of a turn, and then for one call after another.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import RolloutConfig, VLLMConfig
from grpo_fast.data.types import Prompt
from grpo_fast.environments import episodes
from grpo_fast.environments.tools import Toolset, Toolsets
from grpo_fast.rollout import Completion, Requests, Sampling, make_engine
from grpo_fast.rollout.requests import Request

from . import models
from .contest import Contest, Entrant, Prepared
from .peers import choose_names
from .rollout import ENGINES
from .session import add_common_arguments, add_sizes, check_common, run_session, sizes_of

GOAL = "times decoding, of what slow tools take without the longest chain of calls, should be at most 1.2"
CALL, LAST, END = range(3)  # tokens: a turn ends with END, and before it stands whether it calls the tool
OWN, ANSWER = 64, 16  # tokens of a prompt after the common ones, and of a tool's answer
SIZES = {
    "prompts": (8, 8, "of one rollout"),
    "group": (8, 8, "completions a prompt"),
    "common": (256, 192, "tokens that all prompts begin with, such as tools' schemas"),
    "turn": (256, 12, "tokens of the model's longest turn; the shortest has half as many"),
}


class Template:
    """In place of `TurnTemplate`: what a turn's tokens say."""

    end_id = END

    def parse(self, token_ids: Sequence[int]) -> dict[str, Any]:
        calls = [{"function": {"name": "tool", "arguments": {}}}] if token_ids[-2] == CALL else []
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def after(self, messages: object) -> tuple[int, ...]:
        return tuple(range(3, 3 + ANSWER))


def scripted(longest: int) -> type[Requests]:
    """In place of `Requests`: a request's seed says how long its turn is, and if a second is the last."""

    class Scripted(Requests):
        def ask(self, token_ids: Sequence[int], sampling: Sampling) -> Any:
            length = random.Random(sampling.seed).randint(max(2, longest // 2), longest)
            return super().ask(token_ids, replace(sampling, max_completion_length=length))

        def give(self, request: Request, answer: Completion | Exception) -> None:
            if isinstance(answer, Completion):
                chance, turns = random.Random(request.sampling.seed), request.token_ids.count(END)
                last = turns >= 2 or (turns == 1 and chance.random() < 0.5)
                written = (*answer.token_ids[:-2], LAST if last else CALL, END)
                answer = replace(answer, token_ids=written, truncated=False)
            super().give(request, answer)

    return Scripted


def count_cached(vllm: Any, first: int) -> list[tuple[int, int]]:
    """Of each prompt longer than `first` tokens, as it ends: tokens that vLLM had cached, and all."""
    step, found = vllm.step, []

    def counted() -> Any:
        outputs = step()
        sizes = ((o.num_cached_tokens, len(o.prompt_token_ids)) for o in outputs if o.finished)
        found.extend(pair for pair in sizes if pair[1] > first)
        return outputs

    vllm.step = counted
    return found


def contest(shape: dict[str, Any], model: ModelConfig, seed: int) -> Contest:
    """One engine, its tools at once and slow."""
    held, closing, size = {}, ExitStack(), shape["common"] + OWN
    ids = random.Random(seed).choices(range(3, models.vocabulary_of(model.path)), k=shape["common"])
    prompts = [Prompt(i, "", (*ids, *[3 + i] * OWN), {}) for i in range(shape["prompts"])]
    sampling = Sampling(max_completion_length=3 * (shape["turn"] + ANSWER), seed=seed)

    def start() -> None:
        policy = models.make_policy(model, shape["layers"], seed)
        policy.tokenizer.chat_template = "{{ messages }}"
        cache = VLLMConfig(kv_cache_gib=2.0 if model.device == "cpu" else None)
        config = RolloutConfig(engine=shape["engine"], vllm=cache)
        longest = size + sampling.max_completion_length
        engine = closing.enter_context(make_engine(config, policy, max_length=longest))
        cached = count_cached(engine._vllm, size) if shape["engine"] == "vllm" else []
        held.update(engine=engine, policy=policy, cached=cached)
        stubs = {"TurnTemplate": lambda *_: Template(), "Requests": scripted(shape["turn"])}
        closing.enter_context(patch.multiple(episodes, **stubs))

    def prepare(seconds: float) -> Prepared:
        engine, policy, tool = held["engine"], held["policy"], partial(time.sleep, seconds)
        tool.__name__ = "tool"
        toolsets = Toolsets({None: Toolset((tool,), None, ())}, ())
        rollout = episodes.EpisodeRollout(RolloutConfig(), toolsets, policy.tokenizer, [END])
        done: list[Completion] = []

        def run(_: object) -> None:
            done[:] = [c for group in rollout(engine, prompts, shape["group"], sampling) for c in group]

        def metrics(taken: float) -> dict[str, float]:
            calls = [one.episode.tool_calls for one in done]
            found = {"tokens": float(sum(one.num_sampled for one in done)), "calls": float(sum(calls))}
            if seconds:
                found["chain_seconds"] = chain = seconds * max(calls)
                found["times_decoding"] = (taken - chain) / statistics.median(at_once.seconds)
                found["one_by_one_seconds"] = taken - chain + seconds * sum(calls)
            if held["cached"]:
                cached, total = (sum(column) for column in zip(*held["cached"], strict=True))
                found["later_turns_cached"] = cached / total
            return found

        return Prepared(run, metrics=metrics, reset=lambda: engine.sync(policy))

    at_once = Entrant("tools that take no time", partial(prepare, 0.0))
    slow = Entrant("ours, slow tools", partial(prepare, shape["seconds"]))
    options = {"share": start, "release": closing.close, "wall": True, "memory": False}
    return Contest(shape, [at_once, slow], torch.device(model.device), **options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=3)
    models.add_models(parser, ["Qwen2.5-1.5B"], ["SmolLM2-135M"], cpu_layers=4)
    add_sizes(parser, SIZES)
    parser.add_argument("--seconds", type=float, default=0.5, help="that a call takes (0.5)")


def main(options: argparse.Namespace) -> int:
    check_common(options)
    more, contests = {"seconds": options.seconds, "dtype": options.dtype}, []
    for model, shape in models.chosen_models(options):
        for name in choose_names(list(ENGINES), options.impl):
            of_engine = {"engine": name, **shape, **sizes_of(options, SIZES), **more}
            contests.append(contest(of_engine, model, options.seed))
    return run_session(options, contests, notes=[GOAL])
