import pytest

from grpo_fast.data import exclude_overlap, load_prompts
from grpo_fast.data.config import DatasetConfig


@pytest.fixture
def load(tokenizer, write):
    def load(name, *prompts, **options):
        source = write(*({"prompt": prompt} for prompt in prompts), name=f"{name}.jsonl")
        return load_prompts(DatasetConfig(source=source, **options), tokenizer)

    return load


def questions(dataset):
    return [prompt.prompt for prompt in dataset]


def test_held_out_questions_leave_the_training_set_and_are_counted(load):
    train = load("train", "one", "two", "three")
    kept = exclude_overlap(train, load("test", "two"))
    assert questions(kept) == ["one", "three"]
    assert (kept.report.overlapping, kept.report.rows) == (1, 3)
    assert len(train) == 3


def test_case_and_spacing_make_no_new_question(load):
    kept = exclude_overlap(load("train", "What  is\tONE ?", "two"), load("test", "what is one?"))
    assert questions(kept) == ["two"]


def test_another_order_is_another_question_in_prose(load):
    kept = exclude_overlap(load("train", "one is two"), load("test", "two is one"))
    assert questions(kept) == ["one is two"]


def test_commuted_questions_are_excluded_on_request(load):
    kept = exclude_overlap(load("train", "31 + 6 =", "3 + 16 ="), load("test", "6 + 31 ="), any_order=True)
    assert questions(kept) == ["3 + 16 ="]


def test_a_decimal_number_is_one_word(load):
    kept = exclude_overlap(load("train", "2.5 + 3.1"), load("test", "3.5 + 2.1"), any_order=True)
    assert questions(kept) == ["2.5 + 3.1"]


def test_system_prompts_and_examples_take_no_part(load):
    conversation = [{"role": "user", "content": "what is one"}]
    train = load("train", conversation, "two", system_prompt="be brief", examples=[("two ?", "2")])
    held_out = load("test", [{"role": "system", "content": "be"}, *conversation])
    assert questions(exclude_overlap(train, held_out)) == ["two"]


def test_nothing_left_is_refused(load):
    with pytest.raises(
        ValueError, match=r"all 1 training prompts of .*train\.jsonl occur in the held-out set"
    ):
        exclude_overlap(load("train", "one"), load("test", "one"))


def test_neighbouring_seeds_of_a_task_are_found_out_with_commuted_sums(tokenizer):
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}

    def load(seed, size):
        config = DatasetConfig(source="reasoning_gym:chain_sum", size=size, seed=seed, options=options)
        return load_prompts(config, tokenizer)

    train, held_out = load(0, 50), load(40, 50)
    kept = exclude_overlap(train, held_out)
    words = {tuple(sorted(prompt.prompt.split())) for prompt in held_out}
    assert kept.report.overlapping >= 10
    assert not any(tuple(sorted(prompt.prompt.split())) in words for prompt in kept)
