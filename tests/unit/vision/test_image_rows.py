"""Images of rows: places in the prompt, placeholders, patches, and rejected rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_processor import write_processor

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.image_arrays import array_buffers, buffer_arrays
from mcore_rl.data.loading import load_prompts
from mcore_rl.data.trajectories import images_of, join_rows, take_rows
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import Prompt, PromptImages, Trajectory
from mcore_rl.vision.processor import ImageProcessor
from tests.selection import needs_package
from tests.unit.data.rows import jsonl, parquet
from tests.vision_models import SPECIAL, png, vision_tokenizer

pytestmark = needs_package("torchvision", "make setup")
IMAGE, _, START, END = SPECIAL.values()
SMALL, WIDE = png(16, 16), png(16, 32, 1)  # 4 and 8 features of 8 x 8 pixels


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    directory = tmp_path_factory.mktemp("model")
    write_processor(directory, vision_tokenizer(), "qwen3_vl")
    ids = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    (directory / "config.json").write_text(json.dumps(ids))
    return ImageProcessor.load(directory, vision_tokenizer(), "model.hf_path")


def load(path: Path, processor: ImageProcessor | None, **data: Any) -> Prompt:
    config = DataConfig(train=[str(path)], **data)
    return load_prompts(str(path), vision_tokenizer(), config, RolloutConfig(), images=processor)[0][0]


def row(prompt: Any, *images: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": "w3", "images": list(images)}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PARTS = [{"type": "image"}, {"type": "text", "text": " w5 "}, {"type": "image"}, {"type": "text", "text": " w6"}]


def test_load_prompts_forms_of_images_give_equal_tokens(tmp_path: Path, processor: ImageProcessor) -> None:
    (tmp_path / "wide.png").write_bytes(WIDE)
    text = "<image> w5 <image> w6"
    uri = f"data:image/png;base64,{base64.b64encode(SMALL).decode()}"
    own = [{"type": "image_url", "image_url": {"url": uri}}, PARTS[1], {"type": "image", "image": "wide.png"}, PARTS[3]]
    objects = [{"bytes": SMALL, "path": None}, {"bytes": WIDE, "path": None}]
    files = [
        jsonl(tmp_path / "paths.jsonl", [row(text, {"image": uri}, "wide.png")]),
        jsonl(tmp_path / "messages.jsonl", [row(user(text), uri, {"path": "wide.png"})]),
        jsonl(tmp_path / "parts.jsonl", [row(user(PARTS), uri, str(tmp_path / "wide.png"))]),
        jsonl(tmp_path / "own.jsonl", [row(user(own))]),
        parquet(tmp_path / "bytes.parquet", [row(user(text), *objects)]),
    ]
    for path in files:
        prompt = load(Path(path), processor)
        tokens = [0, START, *[IMAGE] * 4, END, 5, START, *[IMAGE] * 8, END, 6]
        assert prompt.token_ids.tolist() == tokens, path
        images = processor.process(prompt.images, prompt.token_ids, "test")
        assert images.starts.tolist() == [2, 9]
        assert images.grids.tolist() == [[1, 4, 4], [1, 4, 8]]
        assert images.pixels.shape == (48, 3 * 2 * 4 * 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (row("w5", SMALL), "has 1 images for 0 places in its prompt; write <image>"),
        (row("<image> <image>", SMALL), "has 1 images for 2 places"),
        (row("<image>", b"no image"), "image 1: an image of 8 bytes cannot be read: it is not a readable image"),
        (row("<image> <|image_pad|>", SMALL), "has 2 placeholder tokens for 1 images; remove the model's special"),
        (row("<image>", png(8, 1700)), "the image processor rejects the image: absolute aspect ratio"),
        ({**row("<image>", SMALL), "videos": ["a.mp4"]}, "has videos, but prompts have text, and images in column"),
    ],
)  # fmt: skip
def test_load_prompts_wrong_images_are_rejected(
    tmp_path: Path, processor: ImageProcessor, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.parquet, row 1.*{message}".replace("|", r"\|")):
        load(Path(parquet(tmp_path / "rows.parquet", [given])), processor)


def test_load_prompts_other_image_rows_are_rejected(tmp_path: Path, processor: ImageProcessor) -> None:
    path = Path(jsonl(tmp_path / "rows.jsonl", [row("<image>", "missing.png")]))
    with pytest.raises(DataError, match=r"line 1: image 1: .*missing\.png cannot be read: No such file"):
        load(path, processor)
    with pytest.raises(DataError, match="line 1 has images, but prompts are text only"):
        load(path, None)
    with pytest.raises(DataError, match=r"is the address https://a/b\.png; download"):
        load(Path(jsonl(path, [row("<image>", "https://a/b.png")])), processor)
    with pytest.raises(DataError, match="has a part of type 'video'"):
        load(Path(jsonl(path, [row(user([{"type": "video"}]))])), processor)
    with pytest.raises(DataError, match=r"data\.long_prompts=truncate_left could cut"):
        load(Path(parquet(tmp_path / "a.parquet", [row("<image>", SMALL)])), processor, long_prompts="truncate_left")


def test_process_image_of_other_size_than_tokenized_is_rejected(processor: ImageProcessor) -> None:
    tokens = np.array([START, *[IMAGE] * 4, END], np.int32)
    with pytest.raises(DataError, match="its images have 8 features, but the prompt was tokenized for 4"):
        processor.process([WIDE], tokens, "prompt 1")


def test_image_processor_without_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.hf_path: .* has no preprocessor_config\.json or processor_config"):
        ImageProcessor.load(tmp_path, vision_tokenizer(), "model.hf_path")


def made_images(seed: int, *, start: int = 1) -> PromptImages:
    pixels = np.random.default_rng(seed).random((4 + 4 * seed, 6)).astype(np.float32)
    return PromptImages.of(pixels, np.array([[1, 2, 2 + 2 * seed]], np.int32), np.array([start], np.int32))


def test_image_rows_survive_selection_joining_and_files() -> None:
    first, second = made_images(0), made_images(1)
    ids, logp, versions = np.array([7, 8], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    # The answer of a tool to the last response contains an image.
    third = first.followed_by(second.images, [3])
    given = [first, first, None, second, third]
    trajectories = [Trajectory(ids, ids[:1], logp, versions, images=each) for each in given]
    packed = pack_trajectories(trajectories)
    assert len(packed.images) == 3  # once per prompt, not per response
    joined = join_rows([take_rows(packed, np.array([3, 2])), take_rows(packed, np.array([2])), packed])
    expected = [second, None, None, *given]
    arrays = buffer_arrays(joined)
    assert len(arrays["image_pixels"]) == 4 + 8  # once per image
    for buffers in (joined, array_buffers(arrays)):
        found = [images_of(buffers, index) for index in range(8)]
        assert [each and each.digest for each in found] == [each and each.digest for each in expected]
        for each, other in zip(found, expected, strict=True):
            assert each is other is None or np.array_equal(each.pixels, other.pixels)
            assert each is other is None or each.starts.tolist() == other.starts.tolist()
    assert take_rows(packed, np.array([2])).images == ()
    assert pack_trajectories(trajectories[2:3]).image_rows is None
