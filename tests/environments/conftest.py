"""A tokenizer that merges letters and speaks with tools, and an engine that says what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_fast.config.load import RECIPES
from grpo_fast.rollout import Completion, Requests, Sampling

TEMPLATE = yaml.safe_load((RECIPES / "calculator.yaml").read_text())["model"]["chat_template"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: what is decoded and encoded again often has other tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEMPLATE, "the answer to the question is in the tool response"] * 2, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.chat_template = TEMPLATE
    return made


@dataclass
class ScriptedEngine:
    """Answers each request by what `say` makes of its context; keeps what it was asked and answered."""

    say: Callable[[tuple[int, ...]], Sequence[int]]
    name: str = "scripted"
    served: list[tuple[tuple[int, ...], Sampling, tuple[int, ...]]] = field(default_factory=list)

    def serve(self, requests: Requests) -> None:
        while (taken := requests.take("any")) is not None:
            for request in taken:
                ids = tuple(self.say(request.token_ids))[: request.sampling.max_completion_length]
                truncated = not ids or ids[-1] != END
                self.served.append((request.token_ids, request.sampling, ids))
                logprobs = tuple(-0.5 - i for i in range(len(ids)))
                requests.give(request, Completion(ids, logprobs, "", truncated))
