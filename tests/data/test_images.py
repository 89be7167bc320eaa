"""Rows with images become conversations in parts; what cannot be read is named with its row."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.policy import ModelConfig
from grpo_fast.data.dataset import PromptDataset, exclude_overlap, prompts_of
from grpo_fast.data.images import placed
from grpo_fast.policy import load_image_reader, load_tokenizer
from tests.vision_models import IMAGE_ID, picture, save_vision_model

Prompts = Callable[..., PromptDataset]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    model = ModelConfig(path=str(folder))
    tokenizer, images = load_tokenizer(model), load_image_reader(model)

    def of(*rows: dict[str, Any], tools: Any = None, **settings: Any) -> PromptDataset:
        return prompts_of(rows, DatasetConfig(source="rows", **settings), tokenizer, tools, images)

    return of


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def test_images_go_before_the_users_text_or_where_their_parts_stand(prompts: Prompts) -> None:
    one, two = picture(56, 56), picture(84, 28)
    dataset = prompts(
        {"prompt": [{"role": "user", "content": "how many"}], "images": [one, two]},
        {"prompt": user("how", {"type": "image"}, "many", {"type": "image"}), "images": [one, two]},
        {"prompt": user({"type": "image", "image": one}, "how many"), "images": None},
        {"prompt": "how many", "image": two},
        {"prompt": user("how ", "many"), "images": []},
        system_prompt="one",
    )
    seen = {"type": "image"}
    contents = [prompt.prompt[-1]["content"] for prompt in dataset]
    assert contents[0] == [seen, seen, {"type": "text", "text": "how many"}]
    assert contents[1] == [*user("how", seen, "many", seen)[0]["content"]]
    assert contents[2] == contents[3] == [seen, {"type": "text", "text": "how many"}]
    assert contents[4] == "how many" and dataset[4].images is None
    assert [prompt.token_ids.count(IMAGE_ID) for prompt in dataset] == [7, 7, 4, 3, 0]


def test_an_image_is_the_same_as_a_file_as_bytes_and_as_an_object(prompts: Prompts, tmp_path: Path) -> None:
    image = picture(56, 56)
    image.save(tmp_path / "a.png")
    ways = [image, str(tmp_path / "a.png"), encoded(image), {"bytes": encoded(image), "path": None}]
    ways += [{"bytes": None, "path": str(tmp_path / "a.png")}]
    ways += [{"bytes": base64.b64encode(encoded(image)).decode()}]
    dataset = prompts(*({"prompt": "how many", "image": way} for way in ways))
    assert len({prompt.images.digest for prompt in dataset if prompt.images}) == 1
    (other,) = prompts({"prompt": "how many", "image": picture(56, 56)})
    assert other.images and other.images.digest != dataset[0].images.digest  # type: ignore[union-attr]
    assert dataset.digest != prompts({"prompt": "how many", "image": picture(56, 56)}).digest
    train = prompts(*({"prompt": "how many", "image": own} for own in (picture(56, 56), image)))
    assert [prompt.index for prompt in exclude_overlap(train, dataset)] == [0]  # images tell questions apart


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "how", "image": 3}, "an image is a path, encoded bytes"),
        ({"prompt": "how", "image": "gone.png"}, "'gone.png' cannot be read"),
        ({"prompt": "how", "image": b"no image"}, "cannot be read"),
        ({"prompt": "how", "image": {"bytes": "iVBORw0KGgo*"}}, "cannot be read: "),
        ({"prompt": "how", "image": {"bytes": encoded(picture(56, 56))[:-40]}}, "truncated"),
        ({"prompt": "how", "image": "/dev/zero"}, "it is no regular file"),
        ({"prompt": "how", "images": "a.png"}, "'images' is a list"),
        ({"prompt": "how", "image": picture(56, 56), "images": [picture(56, 56)]}, "both an 'image' and"),
        ({"prompt": user("how", {"type": "image"}), "images": []}, "1 parts of type image, and the row 0"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "image": picture(56, 56)}, "and no message"),
    ],
)
def test_what_makes_no_prompt_is_named_with_its_row(prompts: Prompts, row: Any, told: str) -> None:
    with pytest.raises(ValueError, match="rows, row 1: ") as raised:
        prompts({"prompt": "how many"}, row)
    assert told in str(raised.value)


def test_images_with_tools_a_text_model_or_a_cut_prompt_are_refused(prompts: Prompts, tokenizer: Any) -> None:
    row = {"prompt": "how many", "image": picture(56, 56)}
    with pytest.raises(ValueError, match=r"rollout\.tools and rollout\.environment do not take"):
        prompts(row, tools=lambda row: [])
    with pytest.raises(ValueError, match="overlong_prompts = 'truncate' would cut into a prompt with images"):
        prompts(row, max_prompt_length=4, overlong_prompts="truncate")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=r"row 0: the row has an image, and the model reads only text"):
        prompts_of([row], DatasetConfig(source="rows"), tokenizer)


def test_paths_are_beside_the_data(tmp_path: Path, prompts: Prompts) -> None:
    (tmp_path / "pictures").mkdir()
    picture(56, 56).save(tmp_path / "pictures" / "a.png")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "how", "image": "pictures/a.png"}\n')
    rows = [{"prompt": "how", "image": "pictures/a.png"}]
    tokens = prompts({"prompt": "how", "image": picture(56, 56)})[0].token_ids
    model = ModelConfig(path=str(save_vision_model(tmp_path / "model", "qwen2_5_vl")))
    dataset = DatasetConfig(source=str(tmp_path / "rows.jsonl"))
    found = prompts_of(rows, dataset, load_tokenizer(model), images=load_image_reader(model))
    assert found[0].token_ids == tokens


def test_parts_are_those_of_trl() -> None:
    theirs = pytest.importorskip("trl.data_utils").prepare_multimodal_messages
    one, two = picture(8, 8), picture(8, 8)
    plain = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "how"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "many"},
    ]
    in_parts = [plain[0], *user("how", {"type": "image"}, "many", {"type": "image"})]
    for turns in (plain, in_parts):
        ours, images = placed(turns, [one, two])
        right = theirs(turns, images=[one, two])
        shown = [part.pop("image") for turn in right for part in turn["content"] if part["type"] == "image"]
        assert ours == right and images == shown
