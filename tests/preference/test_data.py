"""Rows become tokenised comparisons, or are told what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_fast.config import TrainConfig
from grpo_fast.preference.comparison import Comparison
from grpo_fast.preference.data import load_comparisons, load_questions

WORDS = (
    "[UNK] </s> <user> <assistant> <system> one two three four five six seven eight be brief + - = Answer:"
)
# The template writes a newline word after the end token, as chat templates do; training must not learn it.
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] }}"
    "{{ ' </s> brief ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


@pytest.fixture(params=[TEMPLATE, None], ids=["chat", "text"])
def tokenizer(request) -> PreTrainedTokenizerFast:
    return make_tokenizer(request.param)


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    numbers = [str(number) for number in range(-100, 140)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(WORDS.split() + numbers))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="</s>", chat_template=template
    )


def load(
    tmp_path: Path,
    tokenizer: Any,
    rows: list[dict],
    *,
    held_out: bool = False,
    end_ids: Any = None,
    **config: Any,
) -> dict[int, Comparison]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = TrainConfig(
        **{"algorithm": "dpo", "model": {"path": "m"}, "dataset": {"source": str(path)}, **config}
    )
    ranks = run.algorithm == "rank"
    prompts = load_questions(run.dataset, tokenizer, holds_groups=ranks and run.preference.answers is None)
    return load_comparisons(
        prompts, tokenizer, run.preference, ranks=ranks, seed=run.seed, end_ids=end_ids, held_out=held_out
    )


def words(tokenizer: Any, ids: tuple[int, ...]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


REWARDS = [{"reward": "exact_match"}]
PAIR = {"prompt": "one + two =", "chosen": "three", "rejected": "four five"}
KTO = {"loss": {"loss_type": "kto"}}


def test_a_pair_is_a_prompt_and_two_completions_that_end_with_the_end_token(tmp_path, tokenizer):
    (pair,) = load(tmp_path, tokenizer, [PAIR | {"margin": 0.5, "weight": 2}]).values()
    prompt = "<user> one + two = </s> brief <assistant>" if tokenizer.chat_template else "one + two ="
    assert words(tokenizer, pair.prompt.token_ids) == prompt
    assert [words(tokenizer, ids) for ids in pair.completion_ids] == ["three </s>", "four five </s>"]
    assert (pair.grades, pair.margin, pair.weight) == ((1.0, 0.0), 0.5, 2.0)


def test_conversations_give_the_same_tokens_as_text_whether_or_not_they_repeat_the_prompt(tmp_path):
    tokenizer = make_tokenizer(TEMPLATE)

    def says(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    asked = says("user", "one + two =")
    text = load(tmp_path, tokenizer, [PAIR])[0]
    for prompt, before in (([asked], []), ([asked], [asked]), ("one + two =", [asked])):
        row = {"prompt": prompt}
        row |= {name: [*before, says("assistant", PAIR[name])] for name in ("chosen", "rejected")}
        found = load(tmp_path, tokenizer, [row])[0]
        assert (found.prompt.token_ids, found.completion_ids) == (text.prompt.token_ids, text.completion_ids)


def test_system_prompt_and_examples_stand_before_the_prompt_only(tmp_path):
    tokenizer = make_tokenizer(TEMPLATE)
    dataset = {
        "source": str(tmp_path / "rows.jsonl"),
        "system_prompt": "be brief",
        "examples": [("one", "two")],
    }
    (pair,) = load(tmp_path, tokenizer, [PAIR], dataset=dataset).values()
    assert words(tokenizer, pair.prompt.token_ids).startswith("<system> be brief </s> brief <user> one </s>")
    assert words(tokenizer, pair.completion_ids[0]) == "three </s>"


def test_labelled_completions_are_paired_with_the_next_rows_for_ktos_reference_point(tmp_path, tokenizer):
    rows = [
        {"prompt": "one", "completion": "two", "label": True},
        {"prompt": "two", "completion": "three", "label": False},
        {"prompt": "three", "completion": "four", "label": True},
    ]
    found = load(tmp_path, tokenizer, rows, preference=KTO)
    assert [row.grades for row in found.values()] == [(1.0,), (0.0,), (1.0,)]
    assert [words(tokenizer, row.mismatched_ids) for row in found.values()] == [
        "three </s>",
        "four </s>",
        "two </s>",
    ]
    assert load(tmp_path, tokenizer, [PAIR], held_out=True, preference=KTO)[0].grades == (1.0, 0.0)


def test_ranked_groups_keep_ties_sizes_types_and_log_probabilities(tmp_path, tokenizer):
    rows = [
        {"prompt": "one", "group": [{"response": "two", "rank": 1}, {"response": "three", "rank": 1}]},
        {
            "prompt": "two",
            "group_type": "sums",
            "group": [{"response": str(i), "score": i / 2, "logprob": -1.5} for i in range(3)],
        },
    ]
    first, second = load(tmp_path, tokenizer, rows, algorithm="rank").values()
    assert (first.grades, first.group_type, first.behaviour_logprobs) == ((-1.0, -1.0), None, None)
    assert (second.grades, second.group_type) == ((0.0, 0.5, 1.0), "sums")
    assert second.behaviour_logprobs == (-1.5, -1.5, -1.5)


def test_right_answers_are_set_against_plausible_wrong_ones(tmp_path, tokenizer):
    rows = [{"prompt": f"one + {i} =", "answer": str(i - 8)} for i in range(60)]
    answers = {"answers": {"template": "Answer: {answer}"}}
    for index, pair in load(tmp_path, tokenizer, rows, preference=answers).items():
        right, wrong = (int(words(tokenizer, ids).split()[1]) for ids in pair.completion_ids)
        assert right == index - 8 != wrong
    groups = load(tmp_path, tokenizer, rows, algorithm="rank", preference={"answers": {"wrong": 4}})
    for index, group in groups.items():
        values = [int(words(tokenizer, ids).split()[0]) for ids in group.completion_ids]
        assert len(set(values)) == 5
        assert list(group.grades) == [-abs(value - (index - 8)) for value in values]
    again = load(tmp_path, tokenizer, rows, algorithm="rank", preference={"answers": {"wrong": 4}})
    assert groups == again


LABELLED = {"prompt": "one", "completion": "two", "label": True}
FIRST, SECOND = {"response": "two", "rank": 1}, {"response": "three", "rank": "2"}
RANKED = {"prompt": "one", "group": [FIRST, SECOND | {"rank": 2}]}


@pytest.mark.parametrize(
    ("rows", "config", "said"),
    [
        ([{"prompt": "one", "chosen": "two"}], {}, "row 0 has no 'rejected'"),
        ([PAIR | {"rejected": "three"}], {}, "row 0: chosen and rejected are the same"),
        ([PAIR | {"chosen": " "}], {}, "row 0: chosen = ' '"),
        ([PAIR, PAIR | {"margin": "big"}], {}, "cannot read|row 1: margin"),
        ([PAIR | {"weight": -1}], {}, "row 0: weight = -1"),
        ([PAIR | {"chosen": [{"role": "user", "content": "three"}]}], {}, "row 0: chosen"),
        ([PAIR], {"preference": {"max_completion_length": 2}}, "rejected has 3 tokens"),
        ([LABELLED | {"label": "yes"}] * 2, {"preference": KTO}, "label = 'yes'"),
        ([LABELLED], {"preference": KTO}, "at least two rows"),
        ([{"prompt": "one", "answer": "two"}], {"preference": {"answers": {}}}, "answer = 'two'"),
        ([{"prompt": "one"}], {"preference": {"answers": {}}}, "answers.column = 'answer'"),
        ([RANKED, RANKED | {"group": [FIRST, SECOND]}], {"algorithm": "rank"}, r"group\[1\].rank = '2'"),
    ],
)
def test_a_row_that_is_malformed_is_named_with_its_field(rows, config, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load(tmp_path, make_tokenizer(None), rows, **config)


def test_a_template_that_rewrites_the_prompt_once_it_is_answered_is_refused(tmp_path):
    tokenizer = make_tokenizer(
        "{{ messages | length }} {% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    with pytest.raises(ValueError, match="writes the prompt of row 0 otherwise once answered"):
        load(tmp_path, tokenizer, [PAIR])


@pytest.mark.parametrize(
    ("loss_type", "extra", "said"),
    [
        ("aot", {"margin": 0.5}, "row 1: loss_type = 'aot' has no place for a margin"),
        ("aot", {"weight": 0.5}, "row 1: loss_type = 'aot' sorts the pairs and has no place for a weight"),
        ("kto", {"margin": 0.5}, "row 1: kto has no place for a margin"),
    ],
)
def test_what_the_loss_has_no_place_for_is_refused_at_the_start(loss_type, extra, said, tmp_path):
    row = PAIR | {"completion": "three", "label": True}
    preference = {"loss": {"loss_type": loss_type}}
    with pytest.raises(ValueError, match=said):
        load(tmp_path, make_tokenizer(None), [row, row | extra], preference=preference)


def test_any_end_token_of_the_model_ends_a_completion(tmp_path):
    tokenizer = make_tokenizer(None)
    ends = tokenizer.convert_tokens_to_ids(["be"])
    (pair,) = load(tmp_path, tokenizer, [PAIR | {"chosen": "three be brief"}], end_ids=ends).values()
    assert [words(tokenizer, ids) for ids in pair.completion_ids] == ["three be", "four five </s>"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rewards": REWARDS}, "rewards is not read by algorithm = 'dpo'"),
        ({"rollout": {"num_generations": 4}}, "rollout is not read by algorithm = 'dpo'"),
        ({"evaluation": {"num_samples": 4}}, "evaluation.num_samples is not read by algorithm = 'dpo'"),
        ({"preference": {"ranking": {"objective": "pairwise"}}}, "preference.ranking is not read"),
        ({"algorithm": "rank", "preference": {"loss": {"beta": 0.3}}}, "preference.loss is not read"),
        ({"algorithm": "grpo", "rewards": REWARDS, "preference": {"loss": {"beta": 0.3}}}, "preference"),
        ({"algorithm": "grpo"}, "rewards is empty"),
        ({"preference": {"loss": {"beta": 0}}}, "beta = 0.* is out of range"),
        ({"preference": {"answers": {"template": "no answer"}}}, r"has no \{answer\}"),
    ],
)
def test_a_configuration_of_another_algorithm_is_refused_at_the_start(config, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig(
            **{"algorithm": "dpo", "model": {"path": "m"}, "dataset": {"source": "x.jsonl"}, **config}
        )
