"""Images in results of tools: their forms, and limits that the tool process checks before the model sees them."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mcore_rl.rollout.tools import images
from mcore_rl.rollout.tools.images import check_images, encoded_images
from mcore_rl.rollout.tools.interface import ToolError, result_of, result_of_function
from mcore_rl.rollout.tools.kinds.verl_names import ToolResponse
from tests.unit.rollout.tools.made import answers_of, tools_file
from tests.vision_models import png

SMALL = png(8, 16)
URI = f"data:image/png;base64,{base64.b64encode(SMALL).decode()}"
FUNCTIONS = f"""
import base64
from verl.tools.schemas import ToolResponse

SMALL = base64.b64decode({base64.b64encode(SMALL).decode()!r})

def letters(count):
    return ToolResponse(text="seen", image=[SMALL] * count), 0.5, {{"n": count}}

def add(a, b=1):
    return ToolResponse(image=[SMALL[:60]]), 0.5, {{"a": a}}
"""


def saved(kind: str) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(SMALL)).convert("RGB").save(file, kind)
    return file.getvalue()


def test_result_of_has_images_in_every_form() -> None:
    given = [SMALL, URI, {"bytes": SMALL}, Image.open(BytesIO(SMALL))]
    *encoded, drawn = result_of((ToolResponse(text="a", image=given), 1, {})).images
    assert encoded == [SMALL] * 3
    assert Image.open(BytesIO(drawn)).tobytes() == Image.open(BytesIO(SMALL)).tobytes()
    result = result_of_function(ToolResponse(image=[SMALL]))
    assert (result.text, result.content) == ("", [{"type": "image", "image": SMALL}])
    with pytest.raises(ToolError, match="videos"):
        result_of(ToolResponse(video=[SMALL]))


@pytest.mark.parametrize("value", ["/etc/passwd", "https://host/a.png", "file:///a.png", 1, {"path": "a.png"}])
def test_encoded_images_paths_and_addresses_are_rejected(value: Any) -> None:
    with pytest.raises(TypeError, match=r"image 2 is of type .*; return an image of PIL, the bytes of a file"):
        encoded_images([SMALL, value])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16", "F", "CMYK", "YCbCr", "HSV"])
def test_encoded_images_in_every_mode_have_the_same_colours(mode: str) -> None:
    drawn = Image.open(BytesIO(SMALL)).convert("L" if mode in ("I", "I;16", "F") else "RGB").convert(mode)
    (encoded,) = encoded_images([drawn])
    read = Image.open(BytesIO(encoded))
    assert read.format == "PNG"
    assert read.convert("RGB").tobytes() == drawn.convert("RGB").tobytes()


def test_encoded_images_unreadable_picture_is_an_invalid_value() -> None:
    with pytest.raises(ValueError, match=r"image 1 cannot be saved as PNG: .*truncated"):
        encoded_images([Image.open(BytesIO(saved("JPEG")[:-20]))])
    with pytest.raises(ValueError, match=r"image 1 cannot be saved as PNG: conversion from La to"):
        encoded_images([Image.new("La", (8, 8))])


def test_check_images_decodes_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    check_images([SMALL, *map(saved, ("JPEG", "WEBP", "GIF", "BMP"))])
    for wrong in (SMALL[:60], b"no image", saved("TIFF"), saved("EPS")):
        with pytest.raises(ValueError, match="image 2 of the tool is damaged, or in another format than PNG, JPEG"):
            check_images([SMALL, wrong])
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(ValueError, match="image 1 of the tool has 16 x 8 pixels, but may have 100"):
        check_images([SMALL])
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match=r"has \d+ bytes, but may have 100"):
        check_images([SMALL])


def test_toolbox_answers_have_images_within_limits(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    spec = tools_file(tmp_path, "letters", "add")
    two, five, damaged = answers_of(spec, ("letters", {"count": 2}), ("letters", {"count": 5}), ("add", {"a": 1}))
    assert (two.text, two.images, two.reward, two.metrics) == ("seen", (SMALL, SMALL), 0.5, {"n": 2})
    assert (five.text, len(five.images)) == ("seen\n(1 images left out)", 4)
    assert (damaged.images, damaged.reward, damaged.metrics) == ((), 0.5, {"a": 1})
    assert damaged.text.startswith("Error: image 1 of the tool is damaged")
    (none,) = answers_of(spec, ("letters", {"count": 1}), tool_answer_images=0)
    assert (none.text, none.images) == ("seen\n(1 images left out)", ())
