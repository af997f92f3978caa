"""Images in rows of data: their formats, their placeholders, and errors that name the row and the image."""

import base64
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from asyncrl.core.image_files import ImageReader, prompt_images
from asyncrl.data import DataConfig, PromptStream, load_eval_prompts
from tests.support.vision_models import as_png, picture, write_vision_model

ASK = [{"role": "user", "content": "<image>which colour?"}]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def vision_tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture
def read(tmp_path, model_path, vision_tokenizer):
    """Return a function that writes data to a file and reads it: rows to a jsonl file, columns to a parquet file."""

    def make(rows, *, max_pixels=4096, images=True, **options):
        if isinstance(rows, dict):
            path = tmp_path / "rows.parquet"
            pq.write_table(pa.table(rows), path)
        else:
            path = tmp_path / "rows.jsonl"
            path.write_text("\n".join(json.dumps({"ground_truth": "r", **row}) for row in rows))
        config = DataConfig(
            train_files=[str(path)],
            eval_files=[str(path)],
            prompt_key="messages",
            chat_template=True,
            shuffle=False,
            **options,
        )
        reader = ImageReader(model_path=model_path, max_pixels=max_pixels) if images else None
        stream = PromptStream(config, vision_tokenizer, seed=0, images=reader)
        return stream, load_eval_prompts(config, vision_tokenizer, images=reader)

    return make


def test_each_form_of_an_image_gives_the_same_prompt(read, tmp_path):
    png = as_png(picture(width=16, height=8))
    (tmp_path / "a.png").write_bytes(png)
    encoded = base64.b64encode(png).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    in_column, _ = read(
        [
            {"messages": ASK, "images": [form]}
            for form in (str(tmp_path / "a.png"), encoded, {"path": str(tmp_path / "a.png")})
        ],
        images_key="images",
    )
    in_messages, held_out = read(
        [{"messages": [{"role": "user", "content": [part, {"type": "text", "text": "which colour?"}]}]}]
    )
    prompts = [*in_column.take(3), *in_messages.take(1), *held_out]
    for prompt in prompts:
        assert prompt.prompt_ids.tolist() == prompts[0].prompt_ids.tolist()
        assert prompt.messages == prompts[0].messages
    assert prompts[0].messages[0]["content"][0] == part
    assert prompts[0].prompt_ids.tolist().count(5) == 2


def test_file_contents_in_parquet_are_read_as_images(read):
    png = as_png(picture())
    rows = {
        "messages": [[{"role": "user", "content": "<image>and<image>?"}]],
        "images": [[{"bytes": png, "path": "a.png"}, {"bytes": as_png(picture(1, width=8)), "path": None}]],
        "ground_truth": ["r"],
    }
    (prompt,) = read(rows, images_key="images")[0].take(1)
    assert [part["type"] for part in prompt.messages[0]["content"]] == ["image_url", "text", "image_url", "text"]
    assert prompt.prompt_ids.tolist().count(5) == 2 + 1


async def test_the_images_of_a_prompt_match_its_placeholders(read, model_path):
    png = base64.b64encode(as_png(picture(width=64, height=32))).decode()
    (prompt,) = read([{"messages": ASK, "images": [png]}], max_pixels=256, images_key="images")[0].take(1)
    reader = ImageReader(model_path=model_path, max_pixels=256)
    (placed,) = await prompt_images(reader, prompt)
    assert (placed.image.grid, placed.image.num_tokens) == ((1, 2, 4), 2)
    assert set(prompt.prompt_ids[placed.offset : placed.end].tolist()) == {5}
    with pytest.raises(ValueError, match="prompt group 0: 1 images need 32 placeholder tokens"):
        await prompt_images(ImageReader(model_path=model_path, max_pixels=4096), prompt)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["nowhere.png"]}, r"line 1: column 'messages', image 0 is 'nowhere.png' .* no such file exists"),
        ({"images": []}, r"line 1: column 'images' has 0 images for 1 placeholders <image>"),
        ({"images": "a.png"}, r"column 'images' is 'a.png' \(str\), expected a list of images"),
        ({"images": ["aGVsbG8="]}, "image 0 is 5 bytes, which are not an image"),
        ({"images": ["http://host/a.png"]}, "download the image first"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "images": []},
            "message 0, part 0 is .* expected {type: text, text} or {type: image, image}",
        ),
        (
            {"messages": [{"role": "user", "content": "<image><|image_pad|>"}], "images": None},
            r"has 2 image placeholders \(token 5\) for 1 images",
        ),
    ],
)
def test_an_error_names_the_row_and_the_image(read, row, message):
    if row["images"] is None:
        row = {**row, "images": [base64.b64encode(as_png(picture())).decode()]}
    with pytest.raises(ValueError, match=message):
        read([{"messages": ASK, **row}], images_key="images")


def test_images_with_a_text_model_are_refused(read):
    with pytest.raises(ValueError, match=r"data\.images_key is 'images', .*no vision tower"):
        read([{"messages": ASK, "images": []}], images=False, images_key="images")
    part = {"type": "image", "image": "a.png"}
    with pytest.raises(ValueError, match=r"only text messages are supported"):
        read([{"messages": [{"role": "user", "content": [part]}]}], images=False)


def test_a_column_of_images_needs_messages():
    with pytest.raises(ValueError, match=r"data\.images_key is 'images' but data\.chat_template is false"):
        DataConfig(images_key="images")
