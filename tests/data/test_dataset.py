import re

import pytest

from grpo_fast.data import load_prompts
from grpo_fast.data.config import DatasetConfig

CONVERSATION = [{"role": "user", "content": "what is one"}]


def given(tokenizer, dataset, index=0):
    """What the model is given, read back."""
    return tokenizer.decode(dataset[index].token_ids)


class TestForm:
    def test_text_becomes_a_user_turn_where_there_is_a_template_and_stays_text_for_the_rewards(
        self, tokenizer, write
    ):
        dataset = load_prompts(DatasetConfig(source=write({"prompt": "what is one", "answer": 1})), tokenizer)
        assert given(tokenizer, dataset) == "<user> what is one <end> <assistant>"
        assert dataset[0].prompt == "what is one"
        assert dataset[0].columns == {"answer": 1}

    def test_text_stays_text_without_a_template(self, make_tokenizer, write):
        plain = make_tokenizer(chat_template=None)
        dataset = load_prompts(DatasetConfig(source=write({"prompt": "what is one"})), plain)
        assert given(plain, dataset) == "what is one"

    def test_text_stays_text_when_chat_is_off(self, tokenizer, write):
        dataset = load_prompts(DatasetConfig(source=write({"prompt": "what is one"}), chat=False), tokenizer)
        assert given(tokenizer, dataset) == "what is one"

    def test_a_conversation_is_rendered_and_reaches_the_rewards_as_one(self, tokenizer, write):
        dataset = load_prompts(DatasetConfig(source=write({"prompt": CONVERSATION})), tokenizer)
        assert given(tokenizer, dataset) == "<user> what is one <end> <assistant>"
        assert dataset[0].prompt == CONVERSATION

    def test_a_conversation_that_ends_with_the_assistant_is_continued(self, tokenizer, write):
        begun = [*CONVERSATION, {"role": "assistant", "content": "one is"}]
        dataset = load_prompts(DatasetConfig(source=write({"prompt": begun})), tokenizer)
        assert given(tokenizer, dataset) == "<user> what is one <end> <assistant> one is"

    def test_system_prompt_and_examples_come_before_the_question(self, tokenizer, write):
        config = DatasetConfig(
            source=write({"prompt": "what is one"}), system_prompt="be brief", examples=[("two ?", "2")]
        )
        dataset = load_prompts(config, tokenizer)
        assert given(tokenizer, dataset) == (
            "<system> be brief <end> <user> two ? <end> <assistant> 2 <end> "
            "<user> what is one <end> <assistant>"
        )
        assert dataset[0].prompt == "what is one"

    def test_examples_come_after_a_conversations_own_system_message(self, tokenizer, write):
        own = [{"role": "system", "content": "be brief"}, *CONVERSATION]
        config = DatasetConfig(source=write({"prompt": own}), examples=[("two ?", "2")])
        dataset = load_prompts(config, tokenizer)
        assert [turn["role"] for turn in dataset[0].prompt] == ["system", "user", "assistant", "user"]

    def test_a_template_over_the_columns_makes_the_prompt(self, tokenizer, write):
        config = DatasetConfig(
            source=write({"question": "one", "answer": 1}),
            prompt_template="Question : {question} ?",
            chat=False,
        )
        dataset = load_prompts(config, tokenizer)
        assert dataset[0].prompt == "Question : one ?"
        assert dataset[0].columns == {"question": "one", "answer": 1}

    def test_a_renamed_column_may_be_the_prompt(self, tokenizer, write):
        config = DatasetConfig(source=write({"question": "one"}), rename={"question": "prompt"})
        assert load_prompts(config, tokenizer)[0].prompt == "one"


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "options", "message"),
        [
            ({"question": "one"}, {}, "dataset.prompt_column = 'prompt' is no column: there are question"),
            ({"promt": "one"}, {}, "did you mean 'promt'?"),
            ({"prompt": "  "}, {}, "the prompt of row 0 is empty"),
            ({"prompt": 3}, {}, "row 0 must be text or a list of messages, got int: 3"),
            ({"prompt": []}, {}, "row 0 must be text or a list of messages, got list: []"),
            ({"prompt": [{"role": "user"}]}, {}, "a message is {role: text, content: text}"),
            ({"prompt": [{"role": "system", "content": "be"}]}, {}, "ends with a system message"),
            (
                {"prompt": [{"role": "tool", "content": "be"}]},
                {},
                "refuses row 0 (roles tool): no tools here",
            ),
            ({"prompt": CONVERSATION}, {"chat": False}, "is a conversation, but dataset.chat = false"),
            ({"prompt": "one"}, {"chat": False, "system_prompt": "be"}, "dataset.system_prompt makes turns"),
            ({"prompt": "one"}, {"chat": False, "examples": [("a", "b")]}, "dataset.examples makes turns"),
            (
                {"prompt": "one"},
                {"prompt_template": "{qestion}"},
                "names the column 'qestion': there are prompt",
            ),
            ({"prompt": "one"}, {"prompt_template": "{}"}, "a field without a name"),
            ({"prompt": "one"}, {"prompt_template": "{prompt"}, "prompt_template is malformed"),
        ],
    )
    def test_what_makes_no_prompt_is_refused(self, tokenizer, write, row, options, message):
        config = DatasetConfig(source=write(row), **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            load_prompts(config, tokenizer)

    def test_two_system_messages_are_refused(self, tokenizer, write):
        own = [{"role": "system", "content": "be brief"}, *CONVERSATION]
        config = DatasetConfig(source=write({"prompt": own}), system_prompt="be")
        with pytest.raises(ValueError, match="row 0 has a system message of its own"):
            load_prompts(config, tokenizer)

    @pytest.mark.parametrize(
        ("prompt", "options", "message"),
        [
            ("one", {"chat": True}, "dataset.chat = true, but the tokenizer has no chat template"),
            ("one", {"system_prompt": "be"}, "dataset.system_prompt makes turns of a conversation"),
            (CONVERSATION, {}, "row 0 is a conversation, but the tokenizer has no chat template"),
        ],
    )
    def test_a_missing_chat_template_is_refused_with_the_remedy(
        self, make_tokenizer, write, prompt, options, message
    ):
        config = DatasetConfig(source=write({"prompt": prompt}), **options)
        with pytest.raises(
            ValueError, match=re.escape(message) + ".*set model.chat_template to a Jinja file"
        ):
            load_prompts(config, make_tokenizer(chat_template=None))

    def test_a_tokenizer_that_makes_nothing_of_a_prompt_is_refused(self, make_tokenizer, write):
        silent = make_tokenizer(chat_template="{{ '' }}")
        with pytest.raises(ValueError, match="makes no tokens of the prompt of row 0"):
            load_prompts(DatasetConfig(source=write({"prompt": "one"})), silent)


class TestLength:
    @pytest.fixture
    def load(self, tokenizer, write):
        source = write({"prompt": "one"}, {"prompt": "one two three"}, {"prompt": "four five"})

        def load(**options):
            return load_prompts(DatasetConfig(source=source, chat=False, **options), tokenizer)

        return load

    def test_too_long_prompts_are_filtered_and_counted(self, load):
        dataset = load(max_prompt_length=2)
        assert [prompt.index for prompt in dataset] == [0, 2]
        assert (dataset.report.rows, dataset.report.filtered, dataset.report.longest) == (3, 1, 3)

    def test_too_long_prompts_keep_their_end_when_truncated(self, load, tokenizer):
        dataset = load(max_prompt_length=2, overlong_prompts="truncate")
        assert given(tokenizer, dataset, 1) == "two three"
        assert (dataset.report.rows, dataset.report.truncated, dataset.report.filtered) == (3, 1, 0)

    def test_too_long_prompts_are_an_error_on_request(self, load):
        with pytest.raises(ValueError, match=r"1 of 3 prompts .* max_prompt_length = 2 .* row 1 with 3"):
            load(max_prompt_length=2, overlong_prompts="error")

    def test_the_default_length_holds_where_the_dataset_sets_none(self, tokenizer, write):
        source = write({"prompt": "one"}, {"prompt": "one two three"})
        config = DatasetConfig(source=source, chat=False)
        assert len(load_prompts(config, tokenizer, default_max_prompt_length=2)) == 1
        own = config.model_copy(update={"max_prompt_length": 3})
        assert len(load_prompts(own, tokenizer, default_max_prompt_length=2)) == 2

    def test_a_limit_that_leaves_nothing_is_refused(self, tokenizer, write):
        config = DatasetConfig(source=write({"prompt": "one two three"}), chat=False, max_prompt_length=2)
        with pytest.raises(ValueError, match=r"all 1 prompts .* \(the shortest has 3\): raise it"):
            load_prompts(config, tokenizer)


def test_a_generated_task_is_a_dataset(tokenizer):
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 2}
    config = DatasetConfig(source="reasoning_gym:chain_sum", size=20, seed=5, options=options)
    dataset = load_prompts(config, tokenizer)
    prompt = dataset[0]
    assert len(dataset) == 20
    assert given(tokenizer, dataset).startswith("<user> State the final answer")
    assert prompt.columns["answer"] == prompt.columns["entry"]["answer"]
    assert prompt.columns["question"] == prompt.prompt


def test_slices_of_a_dataset_are_prompts(tokenizer, write):
    dataset = load_prompts(DatasetConfig(source=write({"prompt": "one"}, {"prompt": "two"})), tokenizer)
    assert [prompt.prompt for prompt in dataset[:1]] == ["one"]
    assert len(dataset[:None]) == 2
