import pytest
from tokenizers import AddedToken

from grpo_fast.data.text import completion_texts

TEMPLATE = "{{ '<start_of_turn>' }}{{ '<|turn|>' }}{{ '<think>' }}{{ '</lone>' }}"


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("<answer>", True),
        ("<think>", True),
        ("</lone>", True),
        ("<|reserved|>", True),
        ("<start_of_turn>", False),
        ("<|turn|>", False),
        ("<pad>", False),
        ("<end>", False),
    ],
)
def test_a_completions_text_keeps_the_special_tokens_of_answers(make_tokenizer, token, shown):
    tokenizer = make_tokenizer(TEMPLATE)
    words = [
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "</lone>",
        "<|reserved|>",
        "<start_of_turn>",
        "<|turn|>",
        "<end>",
    ]
    tokenizer.add_special_tokens(
        {"pad_token": "<pad>", "extra_special_tokens": [AddedToken(word, special=True) for word in words]}
    )
    end, one, two = tokenizer.convert_tokens_to_ids(["<end>", "one", "two"])
    ids = [one, tokenizer.convert_tokens_to_ids(token), two, end]
    (text,) = completion_texts(tokenizer, [ids], [end])
    assert text.split() == ["one", *[token] * shown, "two"]
