import pytest
from tokenizers import AddedToken

from grpo_fast.data.text import completion_texts

TEMPLATE = "{{ '<start_of_turn><|turn|><think></lone>[THINK][INST][/THINK][/INST]</s>' }}"


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("<answer>", True),
        ("<think>", True),
        ("</lone>", True),
        ("[/THINK]", True),
        ("</stop>", True),
        ("[/INST]", False),
        ("</s>", False),
        ("<|reserved|>", True),
        ("<start_of_turn>", False),
        ("<|turn|>", False),
        ("<pad>", False),
        ("<end>", False),
    ],
)
def test_a_completions_text_keeps_the_special_tokens_of_answers(make_tokenizer, token, shown):
    tokenizer = make_tokenizer(TEMPLATE)
    completion_texts(tokenizer, [[1]], [2])
    words = (
        *("<answer>", "</answer>", "<think>", "</think>", "</lone>", "[THINK]", "[/THINK]", "[INST]"),
        *("[/INST]", "<s>", "</s>", "</stop>", "<|reserved|>", "<start_of_turn>", "<|turn|>", "<end>"),
    )
    tokenizer.add_special_tokens(
        {"pad_token": "<pad>", "extra_special_tokens": [AddedToken(word, special=True) for word in words]}
    )
    end, stop, one, two = tokenizer.convert_tokens_to_ids(["<end>", "</stop>", "one", "two"])
    ids = [one, tokenizer.convert_tokens_to_ids(token), two, end]
    (text,) = completion_texts(tokenizer, [ids], [end, stop])
    assert text.split() == ["one", *[token] * shown, "two"]
