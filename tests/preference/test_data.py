"""Rows become tokenised comparisons, or are told what is wrong with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_fast.config.schema import TrainConfig
from grpo_fast.data import load_prompts
from grpo_fast.preference.comparison import Comparison, mismatched
from grpo_fast.preference.data import load_comparisons

WORDS = (
    "[UNK] </s> <user> <assistant> <system> one two three four five six seven eight be brief + - = Answer:"
)
# The template writes a newline word after the end token, as chat templates do; training must not learn it.
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] }}"
    "{{ ' </s> brief ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    numbers = [str(number) for number in range(-100, 140)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(WORDS.split() + numbers))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="</s>", chat_template=template
    )


CHAT, PLAIN = make_tokenizer(TEMPLATE), make_tokenizer(None)


def load(
    tmp_path: Path, rows: list[dict], tokenizer: Any = PLAIN, *, end_ids: Any = (), held_out: bool = False,
    **config: Any,
) -> list[Comparison]:  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = TrainConfig(
        **{"algorithm": "dpo", "model": {"path": "m"}, "dataset": {"source": str(path)}, **config}
    )
    ranks = run.algorithm == "rank"
    prompts = load_prompts(run.dataset, tokenizer)
    settings = {"ranks": ranks, "seed": run.seed, "end_ids": end_ids, "held_out": held_out}
    return load_comparisons(prompts, tokenizer, run.preference, **settings)


def words(ids: tuple[int, ...]) -> str:
    return " ".join(PLAIN.convert_ids_to_tokens(ids))


def texts(comparison: Comparison) -> list[str]:
    return [words(ids) for ids in comparison.completion_ids]


PAIR = {"prompt": "one + two =", "chosen": "three", "rejected": "four five"}
KTO = {"preference": {"loss": {"loss_type": "kto"}}}
RANK = {"algorithm": "rank"}


@pytest.mark.parametrize(
    ("tokenizer", "prompt"),
    [(CHAT, "<user> one + two = </s> brief <assistant>"), (PLAIN, "one + two =")],
    ids=["chat", "text"],
)
def test_a_pair_is_a_prompt_and_two_completions_that_end_with_the_end_token(tokenizer, prompt, tmp_path):
    (pair,) = load(tmp_path, [PAIR | {"margin": 0.5, "weight": 2}], tokenizer)
    assert words(pair.prompt.token_ids) == prompt
    assert texts(pair) == ["three </s>", "four five </s>"]
    assert (pair.grades, pair.margin, pair.weight) == ((1.0, 0.0), 0.5, 2.0)


def test_conversations_give_the_same_tokens_as_text(tmp_path):
    def says(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    asked = says("user", "one + two =")
    (text,) = load(tmp_path, [PAIR], CHAT)
    for prompt, before in (([asked], []), ([asked], [asked]), ("one + two =", [asked])):
        row = {"prompt": prompt}
        row |= {name: [*before, says("assistant", PAIR[name])] for name in ("chosen", "rejected")}
        (found,) = load(tmp_path, [row], CHAT)
        assert (found.prompt.token_ids, found.completion_ids) == (text.prompt.token_ids, text.completion_ids)


def test_system_prompt_and_examples_stand_before_the_prompt_only(tmp_path):
    source = str(tmp_path / "rows.jsonl")
    dataset = {"source": source, "system_prompt": "be brief", "examples": [("one", "two")]}
    (pair,) = load(tmp_path, [PAIR], CHAT, dataset=dataset)
    assert words(pair.prompt.token_ids).startswith("<system> be brief </s> brief <user> one </s>")
    assert texts(pair)[0] == "three </s>"


def test_any_end_token_of_the_model_ends_a_completion(tmp_path):
    ends = PLAIN.convert_tokens_to_ids(["be"])
    (pair,) = load(tmp_path, [PAIR | {"chosen": "three be brief"}], end_ids=ends)
    assert texts(pair) == ["three be", "four five </s>"]


def test_labelled_completions_are_paired_with_the_next_rows(tmp_path):
    rows = [
        {"prompt": "one", "completion": "two", "label": True},
        {"prompt": "two", "completion": "three", "label": False},
        {"prompt": "three", "completion": "four", "label": True},
    ]
    found = load(tmp_path, rows, **KTO)
    assert [row.grades for row in found] == [(1.0,), (0.0,), (1.0,)]
    others = mismatched(found)
    assert [words(others.tokens_of(row)) for row in range(3)] == ["three </s>", "four </s>", "two </s>"]
    with pytest.raises(ValueError, match="kto needs at least two rows"):
        mismatched(found[:1])
    assert load(tmp_path, [PAIR], held_out=True, **KTO)[0].grades == (1.0, 0.0)


def test_ranked_groups_keep_ties_sizes_types_weights_and_log_probabilities(tmp_path):
    ranks = [("2", 1), ("3", 1.0), ("4", 2)]
    rows = [
        {
            "prompt": "one",
            "weight": None,
            "group": [{"response": text, "rank": rank} for text, rank in ranks],
        },
        {
            "prompt": "two",
            "group_type": "sums",
            "weight": 2,
            "group": [{"response": str(i), "score": i / 2, "rank": None, "logprob": -1.5} for i in range(2)],
        },
    ]
    first, second = load(tmp_path, rows, **RANK)
    assert texts(first) == ["2 </s>", "3 </s>", "4 </s>"]
    assert (first.grades, first.group_type, first.weight) == ((-1.0, -1.0, -2.0), None, 1.0)
    assert (second.grades, second.group_type, second.weight) == ((0.0, 0.5), "sums", 2.0)
    assert (first.behaviour_logprobs, second.behaviour_logprobs) == ((None,) * 3, (-1.5, -1.5))


def test_right_answers_are_set_against_plausible_wrong_ones(tmp_path):
    rows = [{"prompt": f"one + {i} =", "answer": str(i - 8)} for i in range(60)]
    pairs = load(tmp_path, rows, preference={"answers": {"template": "Answer: {answer}"}})
    for index, pair in enumerate(pairs):
        right, wrong = (int(text.split()[1]) for text in texts(pair))
        assert right == index - 8 != wrong
    several = RANK | {"preference": {"answers": {"wrong": 4}}}
    groups = load(tmp_path, rows, **several)
    for index, group in enumerate(groups):
        values = [int(text.split()[0]) for text in texts(group)]
        assert len(set(values)) == 5
        assert list(group.grades) == [-abs(value - (index - 8)) for value in values]
    assert load(tmp_path, rows, **several) == groups


LABELLED = {"prompt": "one", "completion": "two", "label": True}
GOOD, BAD = {"response": "4", "rank": 1}, {"response": "5", "rank": 2}


def row(*items: Any, **more: object) -> dict:
    return {"prompt": "2 + 2 =", "group": list(items), **more}


@pytest.mark.parametrize(
    ("rows", "config", "said"),
    [
        ([{"prompt": "one", "chosen": "two"}], {}, "row 0: the row has no 'rejected': .*chosen"),
        ([PAIR | {"rejected": "three"}], {}, "row 0: chosen and rejected are the same"),
        ([PAIR | {"chosen": " "}], {}, "row 0: chosen = ' '"),
        ([PAIR, PAIR | {"margin": "big"}], {}, "row 1: margin = 'big'"),
        ([PAIR | {"weight": -1}], {}, "row 0: weight = -1"),
        ([PAIR | {"chosen": [{"role": "user", "content": "three"}]}], {}, "row 0: chosen"),
        ([PAIR], {"preference": {"max_completion_length": 2}}, "rejected has 3 tokens"),
        ([LABELLED | {"label": "yes"}] * 2, KTO, "label = 'yes'"),
        ([{"prompt": "one", "answer": "two"}], {"preference": {"answers": {}}}, "answer = 'two'"),
        ([{"prompt": "one"}], {"preference": {"answers": {}}}, "answers.column = 'answer'"),
        ([LABELLED, LABELLED | {"margin": 0.5}], KTO, "row 1: loss_type = 'kto' .* no place for margins"),
        ([row(GOOD)], RANK, "row 0: group = "),
        (
            [{"prompt": "one", "groups": [GOOD, BAD]}],
            RANK,
            "row 0: the row has no 'group': .* mean 'groups'",
        ),
        ([row(GOOD, BAD), {"group": [GOOD, GOOD]}], RANK, "row 1: the row has no 'prompt'"),
        ([{"prompt": "p", "group": "4"}], RANK, "group = '4'"),
        ([row(GOOD, {"response": "5"})], RANK, r"group\[1\] = "),
        ([row(GOOD, BAD | {"score": 2})], RANK, "both of rank and score"),
        ([row(GOOD, {"response": "5", "score": 0.5})], RANK, "group mixes rank and score"),
        ([row(GOOD, BAD | {"rank": "2"})], RANK, r"group\[1\].rank = '2'"),
        ([row(GOOD, BAD | {"rank": 0})], RANK, r"group\[1\].rank = 0"),
        ([row(GOOD, BAD | {"response": " "})], RANK, r"group\[1\].response = ' '"),
        ([row(GOOD, BAD | {"reward": 1})], RANK, r"group\[1\].reward"),
        ([row(GOOD, BAD | {"logprob": 0.5})], RANK, r"group\[1\].logprob = 0.5"),
        ([row(GOOD, GOOD | {"rank": 2})], RANK, r"group\[0\] and group\[1\] are the same response"),
        ([row(GOOD, BAD, group_type=3)], RANK, "group_type = 3"),
        ([row(GOOD, BAD, weight=math.inf)], RANK, "weight"),
    ],
)
def test_a_row_that_is_malformed_or_has_no_place_is_named_with_its_field(rows, config, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load(tmp_path, rows, **config)


def test_a_template_that_rewrites_the_prompt_once_it_is_answered_is_refused(tmp_path):
    tokenizer = make_tokenizer(
        "{{ messages | length }} {% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    with pytest.raises(ValueError, match="changes the prompt once it is answered"):
        load(tmp_path, [PAIR], tokenizer)
