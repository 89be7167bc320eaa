"""Train on images: a tiny random model of Qwen2.5-VL's type learns to count shapes.

`python -m grpo_fast.examples.count_shapes` draws pictures of one to four shapes, makes a model and a
tokenizer of a few words, and trains for a minute or two on two CPU cores. The vision tower stays random,
which is enough to count. For a trained model, set `model` to its folder.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import grpo_fast

PLACE, ROWS = 28, 3  # pixels of a token's side, and tokens per side of a picture
NUMBERS = ("one", "two", "three", "four")
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SPECIAL = ["<|endoftext|>", "<|im_end|>", *IMAGE_TOKENS]
WORDS = [*SPECIAL, *NUMBERS, "how", "many", "shapes", "answer", "[UNK]"]
END = WORDS.index("<|im_end|>")
TEMPLATE = """{% for message in messages %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}
{%- endif %}{% endfor %}{% endfor %} answer"""


def pictures(count: int, seed: int) -> list[dict[str, Any]]:
    """Make rows as in TRL: a conversation, its image, and a column for the reward."""
    dice = Random(seed)
    rows = []
    for _ in range(count):
        number = dice.randint(1, len(NUMBERS))
        image = Image.new("RGB", (PLACE * ROWS, PLACE * ROWS), "white")
        for place in dice.sample(range(ROWS * ROWS), number):
            x, y, margin = place % ROWS * PLACE, place // ROWS * PLACE, dice.randint(2, 6)
            box = (x + margin, y + margin, x + PLACE - margin, y + PLACE - margin)
            draw = dice.choice((ImageDraw.Draw(image).ellipse, ImageDraw.Draw(image).rectangle))
            draw(box, fill=tuple(dice.randrange(160) for _ in range(3)))
        question = [{"role": "user", "content": "how many shapes"}]
        rows.append({"prompt": question, "image": image, "answer": NUMBERS[number - 1]})
    return rows


def correct(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
    """Reward the right number, followed by the end of the turn."""
    wanted = zip(completion_ids, answer, strict=True)
    return [float(ids == [WORDS.index(number), END]) for ids, number in wanted]


def save_random_model(folder: Path) -> Path:
    known = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            **{"vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256},
            **{"rope_parameters": rope, "initializer_range": 0.1, "eos_token_id": END, "pad_token_id": 0},
        },
        vision_config={
            **{"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14},
            **{"window_size": 56, "fullatt_block_indexes": [], "out_hidden_size": 64},
            "initializer_range": 0.1,
        },
        **{"vision_start_token_id": 2, "image_token_id": 3, "vision_end_token_id": 4, "video_token_id": 5},
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = END
    processor = Qwen2VLImageProcessorPil(min_pixels=PLACE**2, max_pixels=(PLACE * ROWS) ** 2)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def main(folder: str = "runs/count-shapes", **changes: Any) -> grpo_fast.Run:
    settings: dict[str, Any] = {
        "model": {"path": str(save_random_model(Path(folder) / "model"))},
        "dataset": pictures(2000, seed=0),
        "rewards": correct,
        "evaluation": pictures(400, seed=1),
        "num_generations": 8,
        "prompts_per_step": 32,
        "max_steps": 120,
        "learning_rate": 1e-3,
        "max_completion_length": 2,
        "micro_batch_tokens": 4096,
        "loss": {"loss_type": "grpo", "entropy_coef": 0.01},
        "output_dir": f"{folder}/run",
    }
    run = grpo_fast.train(**settings | changes)
    print(run)
    print(run.metrics[["reward/mean", "groups/flat"]].tail())
    return run


if __name__ == "__main__":
    main()
