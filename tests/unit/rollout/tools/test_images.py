"""Images in results of tools: their forms, and limits that the tool process checks before the model sees them."""

from __future__ import annotations

import asyncio
import base64
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mcore_rl.rollout.tools import images
from mcore_rl.rollout.tools.images import check_images, encoded_images
from mcore_rl.rollout.tools.interface import EpisodeState, ToolError, result_of, result_of_function
from mcore_rl.rollout.tools.kinds.adapters import FunctionTool, VerlTool
from mcore_rl.rollout.tools.kinds.verl_names import BaseTool, ToolResponse
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
    rejected = result_of((ToolResponse(text="a", image=["/a.png"]), 1, {"k": 2}))
    assert rejected.text.startswith("Error: image 1 is of type str")
    assert (rejected.error, rejected.reward, rejected.metrics) == (rejected.text[7:], 1.0, {"k": 2})
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


class Picture:
    """Image of PIL that records the thread in which it is saved."""

    mode, width, height = "RGB", 16, 8
    thread: threading.Thread | None = None

    def convert(self, mode: str) -> Picture:
        raise AssertionError("PNG has the mode")

    def save(self, file: BytesIO, format: str) -> None:
        self.thread = threading.current_thread()
        file.write(SMALL)


class Draws(BaseTool):
    """Tool of verl that returns `picture`."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture

    async def create(self, instance_id: str | None = None, **kwargs: object) -> tuple[str, ToolResponse]:
        return "one", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[ToolResponse, None]:
        return ToolResponse(image=[self.picture]), None

    async def function(self) -> ToolResponse:
        return ToolResponse(image=[self.picture])


@pytest.mark.parametrize("form", [VerlTool, FunctionTool])
def test_pictures_of_tools_on_the_loop_are_saved_in_a_thread(form: type[VerlTool | FunctionTool]) -> None:
    picture, schema = Picture(), {"type": "function", "function": {"name": "t"}}
    draws = Draws(picture)
    tool = VerlTool(draws, schema) if form is VerlTool else FunctionTool(draws.function, schema)
    assert asyncio.run(tool.call(EpisodeState("e", {}), {})).images == (SMALL,)
    assert picture.thread not in (None, threading.current_thread())


def test_encoded_images_large_picture_is_rejected_before_it_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    picture = Picture()
    with pytest.raises(ValueError, match="image 1 has 16 x 8 pixels, but may have 100"):
        encoded_images([picture])
    assert picture.thread is None


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
