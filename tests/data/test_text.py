from tokenizers import AddedToken

from grpo_fast.data.text import completion_texts

TEMPLATE = "{{ '<start_of_turn><|turn|><think></lone>[THINK][INST][/THINK][/INST]</s>' }}"


def test_a_completions_text_keeps_the_special_tokens_of_answers(make_tokenizer):
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
    shown = ("<answer>", "<think>", "</lone>", "[/THINK]", "</stop>", "<|reserved|>")
    hidden = ("[/INST]", "</s>", "<start_of_turn>", "<|turn|>", "<pad>", "<end>")
    ids = [one, *tokenizer.convert_tokens_to_ids([*shown, *hidden]), two, end]
    (text,) = completion_texts(tokenizer, [ids], [end, stop])
    assert text.split() == ["one", *shown, "two"]
