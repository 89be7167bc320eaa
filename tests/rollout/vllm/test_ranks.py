"""Several ranks, each with its vLLM: who generates what, and two real ones that agree with their policies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_fast.distributed.world import World
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm.engine import Asked, VLLMEngine
from grpo_fast.rollout.vllm.sleep import SleepCycle

HERE = Path(__file__).parent


class Answering:
    """vLLM's engine, which answers a request by its prompt's sum and its seed, the last request first."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self.output_processor = SimpleNamespace(request_states={})
        self._in_flight: list[Any] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any, lora_request: None) -> None:
        self.requests.append((name.split("-")[0], name.split("-")[2:], prompt, params))
        tokens = (sum(prompt["prompt_token_ids"]), params[1] % 1000)
        output = SimpleNamespace(token_ids=tokens, logprobs=None, finish_reason="stop")
        self._in_flight.append(SimpleNamespace(request_id=name, outputs=[output], finished=True))

    def step(self) -> list[Any]:
        return [self._in_flight.pop()]

    def is_sleeping(self) -> bool:
        return False


class Ranks(World):
    """One of several whose others have told what they ask for."""

    told: list[Asked]

    def together(self, place: str, work: Callable[[], Any]) -> list[Any]:
        return [work() if rank == self.rank else ask for rank, ask in enumerate(self.told)]


def engine_of(world: World, parallel: int) -> tuple[VLLMEngine, Answering]:
    engine, vllm = VLLMEngine.__new__(VLLMEngine), Answering()
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **options: [str(ids[0])])
    engine._policy = SimpleNamespace(device=torch.device("cpu"), tokenizer=tokenizer, trainable=dict)
    engine._llm, engine._cycle = SimpleNamespace(llm_engine=vllm), SleepCycle(vllm, 0)
    engine._world, engine._max_length, engine._synced = world, 100, ()
    engine._sync, engine._params = SimpleNamespace(adapter=None), lambda sampling, seed: (sampling, seed)
    engine._take_place(parallel)
    return engine, vllm


def test_ranks_of_one_vllm_run_the_same_requests_in_one_order_and_keep_what_each_would_get_alone(rng):
    told, requests, synced = [], [], []
    for rank in range(4):  # the last has no prompts, and changed weights
        prompts = torch.randint(3, 30, (3 - rank, 4), generator=rng).tolist()
        sampling = Sampling(max_completion_length=9, seed=rank)
        told.append(Asked(prompts, 2 + rank, sampling, rank, weights_changed=rank == 3))

    for rank, ask in enumerate(told):
        ranks = Ranks(rank, 4)
        ranks.told = told
        engine, vllm = engine_of(ranks, parallel=2)
        engine.sync = synced.append
        found = engine.generate(ask.prompts, ask.n, ask.sampling)
        assert found == engine_of(World(), 1)[0].generate(ask.prompts, ask.n, ask.sampling)
        assert [len(group) for group in found] == [ask.n] * len(ask.prompts)
        requests.append(vllm.requests)

    assert requests[0] == requests[1] and requests[2] == requests[3]
    assert [len(found) for found in requests[1:3]] == [3 * 2 + 2 * 3, 1 * 4 + 0]
    assert len(synced) == 4 - 1  # the stub of the last rank tells nobody


def test_two_ranks_with_a_vllm_each_or_one_between_them_compute_what_the_policy_computes_and_outlive_it(
    on_vllms_cpu, saved_model
):
    command = [sys.executable, str(HERE / "vllm_ranks.py"), str(saved_model(heads=2))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
