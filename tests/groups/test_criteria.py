from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.groups.config import CriterionConfig, GroupConfig
from grpo_fast.groups.criteria import conversation_prefix, label_ids, make_likeness, tfidf


def combined(*criteria: CriterionConfig, **settings) -> GroupConfig:
    return GroupConfig(strategy="combined", criteria=list(criteria), **settings)


def distances(prompts, config, **settings) -> torch.Tensor:
    everything = torch.arange(len(prompts))
    return make_likeness(prompts, config, **settings).distance(everything, everything)


def test_hashed_tfidf_has_the_cosines_of_the_exact_one_up_to_hashing_noise(seed):
    rng = random.Random(seed)
    documents = [[rng.randrange(5000) for _ in range(rng.randrange(20, 60))] for _ in range(30)]
    documents += [document[::-1] + documents[0][:3] for document in documents[:5]]
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


def test_what_all_prompts_have_counts_little():
    template = list(range(20))
    questions = [[*template, 100 + i // 2, 500 + i] for i in range(100)]  # two of each topic
    first, same_topic, *others = tfidf(questions)
    assert first @ same_topic > 2 * max(first @ other for other in others)


def test_equal_prompts_are_at_no_distance_and_unlike_ones_at_the_largest():
    prompts = [Prompt(i, "", ids, {}) for i, ids in enumerate([(1, 2, 3), (1, 2, 3), (7, 8, 9)])]
    found = distances(prompts, GroupConfig(strategy="similarity"))
    assert found[0, 1] == pytest.approx(0, abs=1e-6)
    assert found[0, 2] > 0.8 and found.max() <= 1


def test_criteria_add_up_with_normalised_weights(make_prompts):
    prompts = make_prompts(20)
    config = combined(
        CriterionConfig(by="column:level", weight=3.0), CriterionConfig(by="column:topic", weight=1.0)
    )
    levels = [prompt.columns["level"] for prompt in prompts]
    span = max(levels) - min(levels)

    found = distances(prompts, config)

    for i, a in enumerate(prompts):
        for j, b in enumerate(prompts):
            number = abs(levels[i] - levels[j]) / span
            expected = 0.75 * number + 0.25 * (a.columns["topic"] != b.columns["topic"])
            assert found[i, j] == pytest.approx(expected, abs=1e-5)


def test_a_criterion_without_spread_does_not_dilute_the_others(make_prompts):
    prompts = make_prompts(10)
    level = CriterionConfig(by="column:level")
    alone = distances(prompts, combined(level))
    beside = distances(prompts, combined(level, CriterionConfig(by="column:same", weight=100.0)))
    torch.testing.assert_close(alone, beside)


def test_without_any_spread_all_prompts_are_alike(make_prompts):
    found = distances(make_prompts(5), combined(CriterionConfig(by="column:same")))
    assert torch.equal(found, torch.zeros(5, 5))


def test_lengths_are_compared_over_their_range():
    prompts = [Prompt(i, "", tuple(range(n)), {}) for i, n in enumerate([2, 4, 10])]
    found = distances(prompts, combined(CriterionConfig(by="length")))
    torch.testing.assert_close(found[0], torch.tensor([0.0, 0.25, 1.0]))


def test_a_users_embedding_and_criterion_are_called_with_the_prompts(make_prompts, write_module):
    prompts = make_prompts(6)
    embed = write_module("embed", "def embed(texts):\n    return [[len(t), 1.0] for t in texts]\n")
    rate = write_module("rate", "def rate(prompts):\n    return [p.columns['level'] for p in prompts]\n")

    by_embedding = distances(prompts, GroupConfig(strategy="similarity", embedding=embed))
    by_rate = distances(prompts, combined(CriterionConfig(by=rate)))

    vectors = torch.tensor([[len(p.prompt), 1.0] for p in prompts])
    cosines = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    torch.testing.assert_close(by_embedding, 1 - cosines, rtol=0, atol=1e-5)
    torch.testing.assert_close(by_rate, distances(prompts, combined(CriterionConfig(by="column:level"))))


def chat(*turns: str) -> Prompt:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Prompt(0, [{"role": roles[turn[0]], "content": turn} for turn in turns], (1,), {})


@pytest.mark.parametrize(
    ("prompt", "turns", "examples", "expected"),
    [
        (chat("s", "u1", "a1", "u2"), None, 0, ["u1", "a1"]),
        (chat("u1", "a1", "u2"), 1, 0, ["u1"]),
        (chat("s", "u0", "a0", "u1", "a1", "u2"), None, 2, ["u1", "a1"]),
        (chat("s", "u0", "a0", "u1"), None, 2, None),
        (chat("s", "u1"), None, 0, None),
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
    ("by", "message"),
    [
        ("meaning", "choose embedding, prefix, length or column:NAME"),
        ("column:levle", "there is no such column: .*did you mean 'level'"),
        ("nowhere:function", "cannot be imported .* Python path"),
        ("math:pi", "is a float, not a function"),
    ],
)
def test_a_wrong_criterion_is_refused_with_the_remedy(make_prompts, by, message):
    with pytest.raises(ValueError, match=message):
        make_likeness(make_prompts(3), combined(CriterionConfig(by=by)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1.0]", r"shape \(1,\) for 3 prompts"),
        ("'text'", "no array of numbers"),
        ("[float('nan')] * 3", "not finite"),
    ],
)
def test_a_criterion_that_returns_something_else_is_refused(make_prompts, write_module, body, message):
    path = write_module("wrong", f"def wrong(prompts):\n    return {body}\n")
    with pytest.raises(ValueError, match=message):
        make_likeness(make_prompts(3), combined(CriterionConfig(by=path)))


def test_an_embedding_must_be_a_vector_a_text(make_prompts, write_module):
    path = write_module("flat", "def flat(texts):\n    return [1.0, 2.0, 3.0]\n")
    with pytest.raises(ValueError, match="return one vector a text"):
        make_likeness(make_prompts(3), GroupConfig(strategy="similarity", embedding=path))
    with pytest.raises(ValueError, match=r"groups\.embedding = 'bert' is unknown; use tfidf"):
        make_likeness(make_prompts(3), GroupConfig(strategy="similarity", embedding="bert"))


def test_a_column_with_numbers_that_are_not_finite_is_refused():
    prompts = [Prompt(i, "", (1,), {"level": value}) for i, value in enumerate([1.0, math.inf])]
    with pytest.raises(ValueError, match=r"column:level.*clean the column"):
        make_likeness(prompts, combined(CriterionConfig(by="column:level")))
