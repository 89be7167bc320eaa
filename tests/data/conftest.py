"""A tokenizer made on the spot: one token a word, and a chat template that shows its turns."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<' + m['role'] + '> ' + m['content'] }}"
    "{% if not (loop.last and m['role'] == 'assistant') %}{{ ' <end> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

WORDS = (
    "<user> <assistant> <system> <end> [UNK] one two three four five six seven eight nine ten "
    "be brief what is + - = ? : Question State the final answer to following arithmetic problem"
)


class WordTokenizer:
    """Builds tokenizers over the words that a test uses, and reads their tokens back."""

    def __call__(self, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
        numbers = [str(number) for number in range(1000)]
        vocabulary = {word: index for index, word in enumerate(dict.fromkeys(WORDS.split() + numbers))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="[UNK]", chat_template=chat_template
        )


@pytest.fixture
def make_tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def write(tmp_path):
    """Writes rows to a JSONL file; gives its path."""

    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
