import re
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_fast.config.data import DatasetConfig
from grpo_fast.data import LoadReport, exclude_overlap, load_held_out, load_prompts
from grpo_fast.data.render import Renderer

CONVERSATION = [{"role": "user", "content": "what is one"}]
BEGUN = [{**CONVERSATION[0], "name": "me"}, {"role": "assistant", "content": "one is"}]
SYSTEM = {"role": "system", "content": "be brief"}
ASKED = "<user> what is one <end> <assistant>"
SHOWN = "<user> two ? <end> <assistant> 2 <end>"
EXAMPLES = {"examples": [("two ?", "2")]}


def given(tokenizer, dataset, index=0):
    """What the model is given, read back."""
    return tokenizer.decode(dataset[index].token_ids)


class TestForm:
    @pytest.mark.parametrize(
        ("prompt", "options", "text"),
        [
            ("what is one", {}, ASKED),
            ("what is one", {"chat": False}, "what is one"),
            ("what is one", {"chat": "no template"}, "what is one"),
            (CONVERSATION, {}, ASKED),
            (BEGUN, {}, f"{ASKED} one is"),
            ("what is one", {"system_prompt": "be brief"}, f"<system> be brief <end> {ASKED}"),
            ("what is one", EXAMPLES, f"{SHOWN} {ASKED}"),
        ],
        ids=str,
    )
    def test_the_model_gets_the_template_and_the_rewards_the_datas_own_form(
        self, make_tokenizer, tokenizer, write, prompt, options, text
    ):
        source = write({"prompt": prompt, "answer": 1})
        if options.get("chat") == "no template":
            options, tokenizer = {}, make_tokenizer(chat_template=None)
        dataset = load_prompts(DatasetConfig(source=source, **options), tokenizer)
        assert given(tokenizer, dataset) == text
        assert dataset[0].prompt == prompt
        assert dataset[0].columns == {"answer": 1}

    def test_calls_have_no_nulls_and_may_stand_without_content(self, make_tokenizer, write):
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        source = write({"prompt": [*CONVERSATION, said, {"role": "tool", "content": "3"}]})
        template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
        (prompt,) = load_prompts(DatasetConfig(source=source), make_tokenizer(template))
        message = prompt.prompt[1]
        assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == {"a": 1}

    def test_configured_turns_come_before_a_conversations_own(self, tokenizer, write):
        source = write({"prompt": [SYSTEM, *CONVERSATION]}, {"prompt": CONVERSATION})
        first, second = load_prompts(DatasetConfig(source=source, **EXAMPLES), tokenizer)
        shown = [{"role": "user", "content": "two ?"}, {"role": "assistant", "content": "2"}]
        assert first.prompt == [SYSTEM, *shown, *CONVERSATION]
        assert second.prompt == [*shown, *CONVERSATION]

    def test_an_answer_already_begun_is_said_with_its_place(self, tokenizer, write, caplog):
        source = write({"prompt": CONVERSATION}, {"prompt": BEGUN})
        load_prompts(DatasetConfig(source=source), tokenizer)
        assert f"1 of 2 prompts end with the assistant ({source}, row 1 the first)" in caplog.text

    def test_a_template_over_the_columns_or_a_renamed_column_makes_the_prompt(self, tokenizer, write):
        source = write({"question": "one", "answer": 1})
        config = DatasetConfig(source=source, prompt_template="Question : {question} ?", chat=False)
        (prompt,) = load_prompts(config, tokenizer)
        assert prompt.prompt == "Question : one ?"
        assert prompt.columns == {"question": "one", "answer": 1}
        (prompt,) = load_prompts(DatasetConfig(source=source, rename={"question": "prompt"}), tokenizer)
        assert (prompt.prompt, prompt.columns) == ("one", {"answer": 1})

    def test_an_answer_is_what_follows_the_prompts_text_to_the_end_of_the_turn(self, make_tokenizer):
        turns = "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
        tokenizer = make_tokenizer(turns + "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}")
        chat, plain = (Renderer(DatasetConfig(source="d", chat=chat), tokenizer) for chat in ("auto", False))
        assert plain.answer("what is one", "two") == "two"
        assert chat.answer("what is one", "two") == chat.answer(CONVERSATION, "two") == "two <end> "
        assert chat.answer(BEGUN, " two") == " two <end> "


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "options", "message"),
        [
            ({"question": "one"}, {}, "dataset.prompt_column"),
            ({"prompt": None, "text": "one"}, {}, "the row has no 'prompt'"),
            ({"prompt": "  "}, {}, "empty"),
            ({"prompt": "one \ud83d"}, {}, "'\\ud83d'"),
            ({"prompt": 3}, {}, "text or a list of messages, got int: 3"),
            ({"prompt": []}, {}, "empty"),
            ({"prompt": [{"role": "user", "content": " "}]}, {}, "empty"),
            ({"prompt": [{"role": "user"}]}, {}, "a message is {role: text, content: text}"),
            ({"prompt": [{"role": "usr", "content": "one"}]}, {}, "'usr': there are assistant"),
            ({"prompt": [{"role": "system", "content": "be"}]}, {}, "ends with a system message"),
            ({"prompt": [{"role": "tool", "content": "be"}]}, {}, "the roles tool: no tools here"),
            ({"prompt": CONVERSATION}, {"chat": False}, "dataset.chat = false"),
            ({"prompt": [SYSTEM, *CONVERSATION]}, {"system_prompt": "be"}, "dataset.system_prompt"),
            ({"prompt": "one"}, {"chat": False, "system_prompt": "be"}, "dataset.system_prompt"),
            ({"prompt": "one"}, {"chat": False, "examples": [("a", "b")]}, "dataset.examples"),
            ({"prompt": "one"}, {"prompt_template": "{qestion}"}, "'qestion'"),
            ({"prompt": "one"}, {"prompt_template": " "}, "the prompt is empty"),
            ({"prompt": "one"}, {"prompt_template": "{prompt"}, "dataset.prompt_template"),
            ({"prompt": "one"}, {"prompt_template": "{prompt.__class__}"}, "{prompt.__class__} reads"),
            ({"prompt": "one"}, {"prompt_template": "{prompt:>9999999999}"}, "is wider than 9999"),
        ],
    )
    def test_what_makes_no_prompt_is_refused(self, tokenizer, write, row, options, message):
        config = DatasetConfig(source=write(row), **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            load_prompts(config, tokenizer)

    def test_a_conversation_without_a_chat_template_is_refused(self, make_tokenizer, write):
        config = DatasetConfig(source=write({"prompt": CONVERSATION}))
        with pytest.raises(ValueError, match=r"has no chat template: set model\.chat_template"):
            load_prompts(config, make_tokenizer(chat_template=None))

    def test_a_row_is_named_by_its_line_and_the_held_out_set_by_its_section(self, tokenizer, write):
        rows = ["one", "two", ""]
        source = write(*({"question": text} for text in rows))
        Path(source).write_text(Path(source).read_text().replace("\n", "\n\n"))
        config = DatasetConfig(source=source, rename={"question": "prompt"})
        with pytest.raises(ValueError, match=rf"^{re.escape(source)}, row 2: the prompt is empty"):
            load_prompts(config, tokenizer)
        with pytest.raises(ValueError, match=rf"^evaluation: {re.escape(source)}, row 2"):
            load_held_out(config, tokenizer)
        missing = DatasetConfig(source="nowhere.jsonl")
        with pytest.raises(FileNotFoundError, match=r"^evaluation: dataset\.source = 'nowhere\.jsonl'"):
            load_held_out(missing, tokenizer)

    def test_a_tokenizer_that_makes_nothing_of_a_prompt_is_refused(self, make_tokenizer, write):
        silent = make_tokenizer(chat_template="{{ '' }}")
        with pytest.raises(ValueError, match=r"row 0: .*makes no tokens of ''"):
            load_prompts(DatasetConfig(source=write({"prompt": [{**SYSTEM, "role": "developer"}]})), silent)


class TestLength:
    @pytest.fixture
    def load(self, tokenizer, write):
        source = write({"prompt": "one"}, {"prompt": "one two three"}, {"prompt": "four five"})

        return lambda **options: load_prompts(DatasetConfig(source=source, chat=False, **options), tokenizer)

    def test_too_long_prompts_are_filtered_and_counted(self, load):
        dataset = load(max_prompt_length=2)
        assert dataset.described.endswith("2 prompts of 3 rows (1 left out, longer than max_prompt_length)")
        assert [prompt.index for prompt in dataset] == [0, 2]
        assert dataset.report == LoadReport(3, filtered=1)
        assert load().report == load(max_prompt_length=3).report == LoadReport(3)

    def test_too_long_prompts_keep_their_end_when_truncated(self, load, tokenizer):
        dataset = load(max_prompt_length=2, overlong_prompts="truncate")
        assert [given(tokenizer, dataset, index) for index in range(3)] == ["one", "two three", "four five"]
        assert dataset.report == LoadReport(3, truncated=1)

    def test_too_long_prompts_are_an_error_on_request_and_where_nothing_is_left(self, load, write, tokenizer):
        with pytest.raises(ValueError, match=r"row 1: 1 of 3 prompts .* max_prompt_length = 2 .* has 3"):
            load(max_prompt_length=2, overlong_prompts="error")
        config = DatasetConfig(source=write({"prompt": "one two three"}), chat=False, max_prompt_length=2)
        with pytest.raises(ValueError, match=r"no prompt of .* \(1 row\) fits .* shortest has 3\): raise it"):
            load_prompts(config, tokenizer)


@pytest.fixture
def questions_of(tokenizer, write):
    def load(name, *prompts, **options):
        source = write(*({"prompt": prompt} for prompt in prompts), name=f"{name}.jsonl")
        return load_prompts(DatasetConfig(source=source, **options), tokenizer)

    return load


def questions(dataset):
    return [prompt.prompt for prompt in dataset]


def test_held_out_questions_leave_the_training_set_and_are_counted(questions_of):
    train = questions_of("train", "one", "two", "three")
    kept = exclude_overlap(train, questions_of("test", "two"))
    assert kept.described.endswith("2 prompts of 3 rows (1 left out, in the held-out set)")
    assert questions(kept) == ["one", "three"]
    assert (kept.report.overlapping, kept.report.rows, len(train)) == (1, 3, 3)
    assert exclude_overlap(kept, questions_of("test", "three")).report.overlapping == 2
    with pytest.raises(ValueError, match=r"train\.jsonl occur in the held-out set"):
        exclude_overlap(train, train)


@pytest.mark.parametrize(
    ("train", "held_out", "generated", "kept"),
    [
        (["What  is\tONE ?", "two"], "what is one?", False, ["two"]),
        (["one is two"], "two is one", False, ["one is two"]),
        (["31 + 6 =", "3 + 16 ="], "6 + 31 =", True, ["3 + 16 ="]),
        (["2.5 + 3.1"], "3.5 + 2.1", True, ["2.5 + 3.1"]),
    ],
    ids=["case and spacing", "order in prose", "commuted", "a decimal number is one word"],
)
def test_what_counts_as_the_same_question(questions_of, train, held_out, generated, kept):
    asked, questions_held_out = questions_of("train", *train), questions_of("test", held_out)
    if generated:
        asked = replace(asked, config=DatasetConfig(source="reasoning_gym:chain_sum", size=2))
    assert questions(exclude_overlap(asked, questions_held_out)) == kept


def test_system_prompts_and_examples_take_no_part(questions_of):
    conversation = [{"role": "user", "content": "what is one"}]
    train = questions_of("train", conversation, "two", system_prompt="be brief", examples=[("two ?", "2")])
    held_out = questions_of("test", [{"role": "system", "content": "be"}, *conversation])
    assert questions(exclude_overlap(train, held_out)) == ["two"]


def test_where_environments_read_the_columns_questions_differ_by_them(tokenizer, write):
    rows = [{"prompt": "what is one", "start": start} for start in (1, 2)]
    train = load_prompts(DatasetConfig(source=write(*rows)), tokenizer)
    held_out = replace(train, prompts=train.prompts[:1])
    assert [p.columns["start"] for p in exclude_overlap(train, held_out, by_columns=True)] == [2]
    with pytest.raises(ValueError, match="occur in the held-out set"):
        exclude_overlap(train, held_out)
