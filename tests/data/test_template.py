import os
import re
import resource
import signal

import pytest
from tokenizers.processors import TemplateProcessing

from grpo_fast.config.data import DatasetConfig
from grpo_fast.data import bounded, load_prompts, template

ASKS = "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
TURNS = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <end> ' }}{% endfor %}"
PLAIN = TURNS + ASKS
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
SYSTEM = {"role": "system", "content": "be brief"}
QUESTION = {"role": "user", "content": "what is one"}
REPLY = {"role": "assistant", "content": "it is surely one"}


NO_SYSTEM = TURNS.replace("m in messages", "m in messages if m.role != 'system'")
LAST_SENTENCE = PLAIN.replace("m.content +", "m.content.split('so')[-1] +")
CUT_SHORT = PLAIN.replace("m.content +", "m.content[:4] +")
MISSPELT = {"chat_template_kwargs": {"enable_thinkng": False}}


@pytest.mark.parametrize(
    "text",
    [
        LOOP.replace("BODY", "x"),
        LOOP.replace("BODY", "{% set x = 1 %}"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% set n = namespace(s='long') %}{% for _ in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{{ 'x' * 30000000000 }}",
        "{{ 'x' * 30000000 }}",
    ],
)
def test_a_chat_template_without_end_is_refused(make_tokenizer, write, monkeypatch, text):
    monkeypatch.setattr(bounded, "LIMIT_SECONDS", 1)
    with pytest.raises(
        ValueError, match=r"row 0: the chat template .*look for a loop or a macro without end"
    ):
        load_prompts(DatasetConfig(source=write({"prompt": "one"})), make_tokenizer(text))


def test_a_template_that_loops_after_an_answer_is_left_alone(make_tokenizer, write, monkeypatch):
    monkeypatch.setattr(bounded, "LIMIT_SECONDS", 1)
    text = PLAIN + "{% if messages[-1].role == 'assistant' %}" + LOOP.replace("BODY", "x") + "{% endif %}"
    assert len(load_prompts(DatasetConfig(source=write({"prompt": "one"})), make_tokenizer(text))) == 1


def test_bounded_work_runs_under_lower_limits_and_reports_a_crash():
    def lowered():
        for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS):
            now = 5 if kind == resource.RLIMIT_CPU else 1 << 44
            resource.setrlimit(kind, (now, now))
        return bounded.run_bounded(lambda: "text")

    assert bounded.run_bounded(lowered) == "text"
    with pytest.raises(ValueError, match="its process ended with code -15"):
        bounded.run_bounded(lambda: os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize(
    ("text", "options", "prompt", "message"),
    [
        (NO_SYSTEM, {"system_prompt": "be"}, "one", r"dataset\.system_prompt: .*role system: 'be'"),
        (LAST_SENTENCE, {"examples": [("two", "five so 2")]}, "one", r"dataset\.examples: .*'five so 2'"),
        (CUT_SHORT, {}, "what is one", "role user: 'what is one'"),
        (PLAIN + "<|turn|>", {}, "<|turn|> one", r"'<\|turn\|>'.*rendered already"),
        (PLAIN + "{{ enable_thinking }}", MISSPELT, "one", r"did you mean 'enable_thinking'"),
        (PLAIN, {"chat_template_kwargs": {"x": 1}, "chat": False}, "one", r"dataset\.chat = false"),
    ],
)
def test_what_a_template_would_lose_of_the_configuration_is_refused(
    make_tokenizer, write, text, options, prompt, message
):
    tokenizer = make_tokenizer(text)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    with pytest.raises(ValueError, match=message):
        load_prompts(DatasetConfig(source=write({"prompt": prompt}), **options), tokenizer)


@pytest.mark.parametrize(
    ("text", "prompt", "message"),
    [
        (TURNS, "one", "writes '<assistant> ' before the assistant's reply, and not at the end of a prompt"),
        (PLAIN, "one", "ends the assistant's turn with ' <end> ', which is no token"),
        (PLAIN, [SYSTEM, QUESTION], None),
        (
            PLAIN.replace("m.content +", "m.content[:11] +"),
            [REPLY, QUESTION],
            "assistant: 'it is surely one'",
        ),
        (TURNS + PLAIN, "what is one plus one ?", "text of the role user more than once: 'what is one plus"),
    ],
)
def test_what_a_template_does_to_the_first_prompt_is_said(
    make_tokenizer, write, caplog, text, prompt, message
):
    rows = [{"prompt": prompt}] * 3
    load_prompts(DatasetConfig(source=write(*rows)), make_tokenizer(text))
    assert len(re.findall(re.escape(message or "leaves out"), caplog.text)) == (message is not None)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (PLAIN, 1),
        (PLAIN + "{{ messages[-1].content }}", 2),
    ],
)
def test_a_question_about_a_mark_is_asked_and_each_problem_is_said_once(
    make_tokenizer, write, caplog, text, count
):
    question = "what does the mark <|turn|> say ?"
    tokenizer = make_tokenizer(text + "{# <|turn|> #}")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"], "pad_token": "<end>"})
    for _ in range(2):
        load_prompts(DatasetConfig(source=write({"prompt": question})), tokenizer)
    assert caplog.text.count("the prompt has '<|turn|>', which") == 1
    assert caplog.text.count("WARNING") == count


@pytest.mark.parametrize(
    ("turn", "ends"),
    [
        ("{{ m.content }}<|turn|>", ["<|turn|>"]),
        ("{{ m.content }} <|response|><|turn|>\n<|text|>", ["<|response|>", "<|turn|>"]),
        ("{% for part in m.content %}{{ part.text }}{% endfor %}<|turn|>", ["<|turn|>"]),
        ("{{ m.content }} <end>", []),
    ],
)
def test_the_tokens_that_end_a_turn_are_found_one_upon_the_other(make_tokenizer, turn, ends):
    tokenizer = make_tokenizer("{% for m in messages %}" + turn + "{% endfor %}")
    assert template.turn_ends(tokenizer) == ()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|response|>", "<|turn|>", "<|text|>"]})
    assert template.turn_ends(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(ends))


def test_the_chat_template_gets_the_datasets_own_variables(make_tokenizer, write):
    tokenizer = make_tokenizer(PLAIN + "{% if enable_thinking is false %}two{% endif %}")
    config = {"source": write({"prompt": "one"}), "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = load_prompts(DatasetConfig(**config), tokenizer)
    assert tokenizer.decode(prompt.token_ids) == "<user> one <end> <assistant> two"


def test_a_beginning_that_the_prompt_has_already_is_not_doubled(make_tokenizer, write, caplog):
    tokenizer = make_tokenizer(None)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = TemplateProcessing("<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer._tokenizer.post_processor = begin
    rows = [{"prompt": "one"}, {"prompt": "<s> two"}]
    found = load_prompts(DatasetConfig(source=write(*rows)), tokenizer)
    assert [tokenizer.decode(prompt.token_ids) for prompt in found] == ["<s> one", "<s> two"]
    assert "1 of 2 prompts" in caplog.text and "begin with '<s>' already" in caplog.text
