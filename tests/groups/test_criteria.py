from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from grpo_fast.config.groups import CriterionConfig, GroupConfig
from grpo_fast.data import Prompt
from grpo_fast.groups.criteria import conversation_prefix, label_ids, tfidf
from tests.groups.conftest import prompt_distance

SIMILAR = GroupConfig(strategy="similarity")


def combined(**weights: float) -> GroupConfig:
    """Weights by criterion, `column_x` for `column:x`."""
    criteria = [CriterionConfig(by=by.replace("_", ":"), weight=w) for by, w in weights.items()]
    return GroupConfig(strategy="combined", criteria=criteria)


def distances(prompts, config) -> torch.Tensor:
    everything = torch.arange(len(prompts))
    return prompt_distance(prompts, config)(everything, everything)


def test_hashed_tfidf_has_the_cosines_of_the_exact_one_up_to_hashing_noise(seed):
    rng = random.Random(seed)
    documents = [[rng.randrange(5000) for _ in range(rng.randrange(20, 60))] for _ in range(30)]
    documents += [document[::-1] + 5 * document[:9] for document in documents[:5]]  # tokens come again
    frequency = Counter(token for document in documents for token in set(document))

    def weights(document):
        return {
            t: (1 + math.log(c)) * math.log(1 + len(documents) / frequency[t])
            for t, c in Counter(document).items()
        }

    def cosine(a, b):
        dot = sum(a[t] * b.get(t, 0.0) for t in a)
        return dot / math.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values()))

    exact = [weights(document) for document in documents]
    embedded = tfidf(documents)

    found = embedded @ embedded.T
    expected = torch.tensor([[cosine(a, b) for b in exact] for a in exact])
    assert embedded.shape == (35, 1024)
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(35))
    assert (found - expected).square().mean().sqrt() < 1.5 / 32
    assert (found - expected).abs().max() < 0.3


def test_criteria_add_up_with_normalized_weights_those_without_spread_aside(make_prompts):
    prompts = make_prompts(20)
    for prompt in prompts:
        prompt.columns["level"] += 1e6  # of which float32 would keep one digit
    levels = [prompt.columns["level"] for prompt in prompts]
    topics = [prompt.columns["topic"] for prompt in prompts]

    found = distances(prompts, combined(column_level=3.0, column_same=100.0, column_topic=1.0))

    for i, j in itertools.product(range(20), repeat=2):
        number = abs(levels[i] - levels[j]) / (max(levels) - min(levels))
        assert found[i, j] == pytest.approx(0.75 * number + 0.25 * (topics[i] != topics[j]), abs=1e-5)
    assert not distances(prompts, combined(column_same=1.0)).any()


def test_lengths_are_compared_over_their_range():
    prompts = [Prompt(i, "", tuple(range(n)), {}) for i, n in enumerate([2, 4, 10])]
    torch.testing.assert_close(distances(prompts, combined(length=1.0))[0], torch.tensor([0.0, 0.25, 1.0]))


@pytest.mark.parametrize("by", ["embedding", "vector", "number"])
def test_a_users_embedding_and_criterion_are_called_with_the_prompts(make_prompts, write_function, by):
    prompts = make_prompts(6)
    body = {
        "embedding": "[[len(t) - 35, 1.0] for t in these]",
        "vector": "[[len(p.prompt) - 35, 1.0] for p in these]",
        "number": "[p.columns['level'] for p in these]",
    }[by]
    path = write_function("these", body)
    mine = GroupConfig(strategy="combined", criteria=[CriterionConfig(by=path)])

    found = distances(prompts, SIMILAR.model_copy(update={"embedding": path}) if by == "embedding" else mine)

    vectors = torch.tensor([[len(p.prompt) - 35, 1.0] for p in prompts])
    likeness = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    expected = (1 - likeness).clamp(max=1)  # opposed is as far as unlike
    expected = distances(prompts, combined(column_level=1.0)) if by == "number" else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def chat(*turns: str) -> Prompt:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Prompt(0, [{"role": roles[turn[0]], "content": turn} for turn in turns], (1,), {})


@pytest.mark.parametrize(
    ("prompt", "turns", "examples", "expected"),
    [
        (chat("s", "u1", "a1", "u2"), None, 0, ["u1", "a1"]),
        (chat("u1", "a1", "u2"), 1, 0, ["u1"]),
        (chat("u1"), 1, 0, ["u1"]),
        (chat("s", "u0", "a0", "u1", "a1", "u2"), None, 2, ["u1", "a1"]),
        (chat("s", "u0", "a0", "u1"), None, 2, None),
        (chat("u1"), 3, 0, None),
        (Prompt(0, "text", (1,), {}), None, 0, None),
    ],
)
def test_the_prefix_is_of_the_rows_own_turns(prompt, turns, examples, expected):
    prefix = conversation_prefix(prompt, turns, examples)
    assert (None if prefix is None else [content for _, content in prefix]) == expected


def test_no_key_equals_nothing_not_even_another_one():
    assert label_ids(["a", None, "b", None, "a"]).tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("key", "value", "body", "named"),
    [
        ("by", "meaning", "", "choose embedding, prefix, length, reward, diversity, column:NAME"),
        ("by", "column:levle", "", "did you mean 'level'"),
        ("by", "column:infinite", "", "column:infinite"),
        ("by", "", "[1.0]", r"shape \(1,\) for 3 prompts"),
        ("by", "", "[float('nan')] * 3", "not finite"),
        ("embedding", "bert", "", r"groups\.embedding = 'bert'"),
    ],
)
def test_a_criterion_or_embedding_that_does_not_fit_is_refused(
    make_prompts, write_function, key, value, body, named
):
    prompts = make_prompts(3)
    for prompt in prompts:
        prompt.columns["infinite"] = math.inf
    value = write_function("argument", body) if body else value
    config = {"strategy": "combined", "criteria": [{"by": value}]}
    with pytest.raises(ValueError, match=named):
        prompt_distance(
            prompts, GroupConfig(**({"strategy": "similarity", key: value} if key == "embedding" else config))
        )
