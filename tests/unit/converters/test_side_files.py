"""Files that are copied along with the weights."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from model_converters.errors import ConversionError
from model_converters.hf.side_files import HF_FOLDER, copy_side_files, side_files_in


def test_copy_side_files_copies_only_model_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    wanted = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tokenizer.json", "x.model"]
    wanted += ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
    for name in (*wanted, "model.safetensors", "README.md", "optimizer.pt"):
        (source / name).write_text(name)
    (source / "tokenizer.d").mkdir()
    copy_side_files(source, tmp_path / "deep" / "target")
    assert sorted(path.name for path in (tmp_path / "deep" / "target").iterdir()) == sorted(wanted)
    assert all((tmp_path / "deep" / "target" / name).read_text() == name for name in wanted)


def test_copy_side_files_config_argument_replaces_file(tmp_path: Path) -> None:
    """The directory that a run started from may be gone when it saves."""
    source = tmp_path / "source"
    with pytest.raises(ConversionError, match=r"config\.json does not exist"):
        copy_side_files(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    for _ in range(2):
        copy_side_files(source, tmp_path / "target", {"model_type": "qwen3"})
        assert json.loads((tmp_path / "target" / "config.json").read_text()) == {"model_type": "qwen3"}
        source.mkdir(exist_ok=True)
        (source / "config.json").write_text("{}")


def test_side_files_in_finds_current_and_older_folder(tmp_path: Path) -> None:
    assert HF_FOLDER == "config_and_tokenizer"
    assert side_files_in(tmp_path) == tmp_path / HF_FOLDER
    (tmp_path / "hf").mkdir()
    assert side_files_in(tmp_path) == tmp_path / "hf"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "modeling_x.py", "x.model"])
def test_side_files_with_a_link_that_leaves_are_rejected(name: str, tmp_path: Path) -> None:
    """The target may be a private file, and exports are published."""
    secret, source = tmp_path / "secret", tmp_path / "source"
    secret.write_text("{}")
    source.mkdir()
    (source / name).symlink_to("../secret")
    for config in (None, {"model_type": "qwen3"}):
        with pytest.raises(ConversionError, match=f"{name} leaves the model directory: it points to .*secret"):
            copy_side_files(source, tmp_path / "target", config)
    assert not (tmp_path / "target").exists()


def test_side_files_of_the_hub_cache_are_copied_as_files(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (blobs / f"hash of {name}").write_text(name)
        (snapshot / name).symlink_to(f"../../blobs/hash of {name}")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    copy_side_files(snapshot, tmp_path / "target")
    copied = {file.name: file.read_text() for file in (tmp_path / "target").iterdir() if not file.is_symlink()}
    assert copied == {"config.json": "config.json", "tokenizer.json": "tokenizer.json", "vocab.json": "tokenizer.json"}


def test_side_files_that_are_not_regular_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "tokenizer.json"
    for make, kind in ((os.mkfifo, "a named pipe"), (partial(os.symlink, "absent"), "a dangling link")):
        make(file)
        with pytest.raises(ConversionError, match=rf"tokenizer\.json is {kind}; it must be a regular file"):
            copy_side_files(tmp_path, tmp_path / "target")
        file.unlink()
