from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.mapping.placement import Piece, TensorPlan
from tests.unit.converters.hf_models import stored


def sharded(directory, config, shards):
    """A sharded checkpoint written by the safetensors library."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, directory / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"part{number}.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture
def checkpoint_dir(tmp_path, dense_config):
    first = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(5.0).double()}
    shards = [first, {"c": torch.randn(3, 4, 5).bfloat16()}]
    return sharded(tmp_path / "hf", dense_config, shards)


def test_read_slices_equal_safetensors_library(checkpoint_dir):
    whole = stored(checkpoint_dir)
    with HFCheckpoint(checkpoint_dir) as checkpoint:
        assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in whole.items()}
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in whole.items())
        for name, dim, start, length in (("a", 0, 1, 2), ("a", 1, 2, 3), ("c", 2, 1, 4)):
            wanted = whole[name].narrow(dim, start, length)
            assert torch.equal(checkpoint.view(name, dim, start, length), wanted)
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.zeros(wanted.shape, dtype=dtype)
                checkpoint.read_into(name, out, dim=dim, start=start)
                assert torch.equal(out, wanted.to(dtype))
        larger = torch.full((5, 6), -1.0)
        checkpoint.read_into("a", larger[1:3], start=2)
    assert torch.equal(larger[1:3], whole["a"][2:])
    assert (larger[[0, 3, 4]] == -1).all()


def test_read_into_slice_outside_tensor_is_rejected(checkpoint_dir):
    with HFCheckpoint(checkpoint_dir) as checkpoint:
        for out, start in ((torch.zeros(2, 6), 3), (torch.zeros(2, 5), 0), (torch.zeros(24), 0)):
            with pytest.raises(ConversionError, match=r"a .* has no slice of shape"):
                checkpoint.read_into("a", out, start=start)
        with pytest.raises(ConversionError, match="has no tensor z"):
            checkpoint.read("z")


def truncate(file, num_bytes):
    os.truncate(file, file.stat().st_size - num_bytes)


def rewrite_header(file, change):
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def link(file, target):
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def replace_by_pipe(file):
    file.unlink()
    os.mkfifo(file)


def replace_by_socket(file):
    file.unlink()
    with contextlib.chdir(file.parent), socket.socket(socket.AF_UNIX) as opened:  # socket paths have about 100 bytes
        opened.bind(file.name)


CONFIG, INDEX, SHARD, OTHER = "config.json", "model.safetensors.index.json", "part0.safetensors", "part1.safetensors"


def on(name, damage, *arguments):
    """Return a function that damages one file of a directory."""
    return lambda directory: damage(directory / name, *arguments)


def header(change, shard=SHARD):
    return on(shard, rewrite_header, change)


def entry(shard=SHARD, tensor="a", **fields):
    return header(lambda header: header[tensor].update(fields), shard)


def replaced(name, content):
    return on(name, lambda file: file.write_bytes(content))


BREAKAGES = {
    "no config": (on(CONFIG, Path.unlink), r"hf/config\.json does not exist"),
    "config is not JSON": (replaced(CONFIG, b"{"), r"hf/config\.json cannot be read as JSON"),
    "index is nested without end": (
        replaced(INDEX, b'{"a": ' + b"[" * 100_000),
        r"index\.json cannot be read as JSON: maximum recursion depth",
    ),
    "header is nested without end": (
        replaced(SHARD, struct.pack("<Q", 100_000) + b"[" * 100_000),
        r"part0\.safetensors is not a safetensors file: its header is not JSON",
    ),
    "unknown model_type": (
        replaced(CONFIG, b'{"model_type": "bert"}'),
        r"hf/config\.json: model_type 'bert' is not supported; known: .*qwen3_moe",
    ),
    "no weights": (on(INDEX, Path.unlink), r"neither model\.safetensors\.index\.json nor model\.safetensors"),
    "missing shard": (on(OTHER, Path.unlink), r"part1\.safetensors cannot be read: No such file"),
    "truncated data": (on(OTHER, truncate, 1), r"part1\.safetensors is truncated: c ends at"),
    "truncated header": (on(SHARD, os.truncate, 20), r"part0\.safetensors is truncated: its"),
    "empty shard": (on(SHARD, os.truncate, 0), r"part0\.safetensors is not a safetensors file"),
    "a pointer instead of the file": (
        replaced(SHARD, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        r"part0\.safetensors is not a safetensors file",
    ),
    "trailing bytes": (
        on(SHARD, lambda file: file.open("ab").write(b"x")),
        r"part0\.safetensors is corrupt: 1 bytes follow",
    ),
    "tensor not in its shard": (
        header(lambda header: header.update(z=header.pop("b"))),
        r"index\.json does not fit its shards: part0\.safetensors lacks b; part0\.safetensors holds z",
    ),
    "shape and extent disagree": (entry(shape=[4, 7]), r"part0\.safetensors: a F32 \(4, 7\) does not have 96 bytes"),
    "unknown dtype": (entry(dtype="F4"), r"part0\.safetensors: a has dtype F4"),
    "index is a pipe": (on(INDEX, replace_by_pipe), r"index\.json is a named pipe; it must be a regular file"),
    "shard is a pipe": (on(OTHER, replace_by_pipe), r"part1\.safetensors is a named pipe"),
    "shard is a directory": (
        on(OTHER, lambda file: (file.unlink(), file.mkdir())),
        r"part1\.safetensors is a directory",
    ),
    "shard is a socket": (on(OTHER, replace_by_socket), r"part1\.safetensors is a socket"),
    "shard is a device": (on(OTHER, link, "/dev/zero"), r"points to /dev/zero"),
    "shard is a link that leaves": (
        on(OTHER, lambda file: link(file, file.rename(file.parents[1] / "elsewhere"))),
        r"part1\.safetensors leaves the model directory: it points to .*/elsewhere",
    ),
    "shard is a loop of links": (
        on(OTHER, lambda file: link(file, file)),
        r"part1\.safetensors is a loop of symbolic links",
    ),
    "index is a link that leaves": (
        on(INDEX, link, "/etc/passwd"),
        r"index\.json leaves the model directory: it points to /etc/passwd",
    ),
    **{
        f"weight_map has {place!r}": (
            replaced(INDEX, json.dumps({"weight_map": {"a": place}}).encode()),
            r"index\.json: weight_map places a in .*; each value must be the name of a file",
        )
        for place in ("../part0.safetensors", "/etc/passwd", "x/../../y", "", 3, None, ["part0"], "part0\0")
    },
    **{
        f"index has {text[:20]!r}": (replaced(INDEX, text), rf"index\.json cannot be read as JSON: .*{problem}")
        for text, problem in (
            (b'{"a": 1, "a": 1}', "the key 'a' appears twice"),
            (b'{"b": {"a": [NaN]}}', "the key 'a' holds NaN or infinity"),
            (b'{"a": -Infinity}', "the key 'a' holds NaN or infinity"),
            (b'{"a": 1e999}', "the key 'a' holds NaN or infinity"),
            (b'{"a": "\\ud800"}', "the key 'a' holds half of a surrogate pair"),
            ('{"a": "\u00e9"}'.encode("latin-1"), "'utf-8' codec can't decode byte"),
            ("{}".encode("utf-16"), "'utf-8' codec can't decode byte"),
            (b"[]", "it holds list, not an object"),
        )
    },
    **{
        f"header has {field} {value}": (
            entry(**{field: value}),
            rf"part0\.safetensors: a has {field} .*; (it|they) must be",
        )
        for field, values in {
            "shape": ([-4, -6], [4.0, 6], [4, True, 6], ["4", 6], "46", 24),
            "data_offsets": ([-1, 95], [0.0, 96], [96, 0], [0, 96, 96], None),
        }.items()
        for value in values
    },
    "dtype is a list": (entry(dtype=["F32"]), r"a has dtype \['F32'\], which is not supported"),
    "weight is of integers": (
        entry(dtype="I32"),
        r"part0\.safetensors: a has dtype torch\.int32; weights must be floating point",
    ),
    "entry is a list": (header(lambda header: header.update(a=["F32"])), r"the header entry of a is malformed"),
    "metadata is no map of texts": (
        header(lambda header: header.update(__metadata__={"format": 1})),
        r"__metadata__ must map strings to strings",
    ),
    "tensors overlap": (
        entry(tensor="b", dtype="F32", shape=[24], data_offsets=[0, 96]),
        r"part0\.safetensors: b does not start where a ends|a does not start where b ends",
    ),
    "tensor ends beyond the file": (
        entry(OTHER, "c", shape=[2**40], data_offsets=[0, 2**41]),
        r"part1\.safetensors is truncated: c ends at byte",
    ),
    "header is longer than the file": (
        replaced(SHARD, struct.pack("<Q", 99_999_999) + b"{}"),
        r"part0\.safetensors is truncated: its header of 99999999 bytes",
    ),
    "header names a tensor twice": (
        replaced(SHARD, struct.pack("<Q", 15) + b'{"a":{},"a":{}}'),
        r"its header is not JSON \(the key 'a' appears twice\)",
    ),
    "index without map": (replaced(INDEX, b"{}"), r"index\.json cannot be read as a safetensors index"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_checkpoint_broken_names_file_in_one_message(breakage, checkpoint_dir):
    damage, message = BREAKAGES[breakage]
    damage(checkpoint_dir)
    with pytest.raises(ConversionError, match=message):
        HFCheckpoint(checkpoint_dir)


def two_tensors():
    """Plan a [4, 6] in two pieces along dim 1 (ranks 0 and 1) and b [3] whole."""
    a = tuple(Piece(rank, "a", 0, 1, 3 * rank, 3, 0) for rank in range(2))
    return [
        TensorPlan("a", (4, 6), torch.float32, "embedding", a),
        TensorPlan("b", (3,), torch.bfloat16, "head", (Piece(0, "b", 0, 0, 0, 3, 0),)),
    ]


def write_all(writer, plans, values):
    for plan in plans:
        for piece in plan.pieces:
            writer.write(plan, piece, values[plan.hf_name].narrow(piece.dim, piece.start, piece.length))


def test_writer_rows_of_columns_are_in_place(tmp_path):
    """Two halves of the rows of each column block, and of whole rows, like the shards of a trainer."""
    a = tuple(Piece(0, "a", 0, 1, start, 3, 0, rows) for start in (0, 3) for rows in ((0, 3), (3, 4)))
    b = tuple(Piece(0, "b", 0, 1, 0, 6, 0, rows) for rows in ((0, 1), (1, 4)))
    plans = [TensorPlan(name, (4, 6), torch.float32, "head", pieces) for name, pieces in (("a", a), ("b", b))]
    values = torch.arange(24.0).reshape(4, 6)
    with HFWriter(tmp_path / "out") as writer:
        writer.begin(plans)
        for plan, piece in ((each, piece) for each in plans for piece in each.pieces):
            writer.write(plan, piece, values[slice(*piece.rows), piece.start : piece.start + piece.length])
        writer.finish()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"a", "b"}
    assert all(torch.equal(tensor, values) for tensor in written.values())


def test_writer_incomplete_tensors_are_named_and_not_published(tmp_path):
    plans = two_tensors()
    writer = HFWriter(tmp_path / "out")
    writer.begin(plans)
    writer.write(plans[0], plans[0].pieces[1], torch.zeros(4, 3))
    writer.write(plans[1], plans[1].pieces[0], torch.zeros(3))
    with pytest.raises(ConversionError, match="1 tensors are incomplete: a"):
        writer.finish()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_writer_exception_leaves_no_files(tmp_path):
    def interrupted():
        with HFWriter(tmp_path / "out") as writer:
            writer.begin(two_tensors())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_writer_rejects_repeated_or_misshapen_piece(tmp_path):
    plans = two_tensors()
    piece = plans[0].pieces[0]
    with HFWriter(tmp_path / "out") as writer:
        writer.begin(plans)
        writer.write(plans[0], piece, torch.zeros(4, 3))
        with pytest.raises(ConversionError, match="written twice"):
            writer.write(plans[0], piece, torch.zeros(4, 3))
        with pytest.raises(ConversionError, match="needs shape"):
            writer.write(plans[0], plans[0].pieces[1], torch.zeros(3, 4))
        with pytest.raises(ConversionError, match="not planned"):
            writer.write(plans[0], piece._replace(start=1), torch.zeros(4, 3))
        writer.abort()
    assert not (tmp_path / "out").exists()


def test_writer_existing_target_is_not_changed(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep").write_text("mine")
    with pytest.raises(ConversionError, match="out exists already"):
        HFWriter(tmp_path / "out").begin(two_tensors())
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["out", "out/keep"]


def test_writer_replaces_files_of_killed_writer(tmp_path):
    plans = two_tensors()
    HFWriter(tmp_path / "out").begin(plans)
    assert not (tmp_path / "out").exists()
    with HFWriter(tmp_path / "out") as writer:
        writer.begin(plans)
        values = {"a": torch.arange(24.0).view(4, 6), "b": torch.tensor([0.5, 2.0, -1.0])}
        write_all(writer, plans, values)
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = stored(tmp_path / "out")
    assert torch.equal(found["a"], values["a"])
    assert found["b"].dtype == torch.bfloat16
    assert torch.equal(found["b"].float(), values["b"])


def test_writer_full_disk_or_no_directory_is_rejected(tmp_path):
    huge = TensorPlan("a", (2**50,), torch.float32, "head", (Piece(0, "a", 0, 0, 0, 2**50, 0),))
    with pytest.raises(ConversionError, match=r"needs .* GiB, the disk has"):
        HFWriter(tmp_path / "out").begin([huge])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"file/out cannot be written"):
        HFWriter(tmp_path / "file" / "out").begin(two_tensors())


def test_writer_finish_copies_config_and_tokenizer(tmp_path, dense_config):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text(json.dumps(dense_config | {"torch_dtype": "bfloat16"}))
    plans = two_tensors()
    with HFWriter(tmp_path / "out", max_shard_bytes=1) as writer:
        writer.begin(plans)
        write_all(writer, plans, {"a": torch.ones(4, 6), "b": torch.ones(3)})
        writer.finish(source)
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"tokenizer.json", *shards, "config.json", "model.safetensors.index.json"}
    # The dtype in config.json must be the dtype of the weights.
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == dense_config | {"torch_dtype": "float32"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 6 * 4 + 3 * 2
    assert set(index["weight_map"].values()) == shards


@pytest.mark.parametrize("whole", [True, False], ids=["directory is a link", "files are links of the hub's cache"])
def test_checkpoint_links_inside_directory_or_cache_are_read(whole, checkpoint_dir, tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "0f"
    if whole:
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(checkpoint_dir)
    else:
        snapshot.mkdir(parents=True)
        blobs = checkpoint_dir.rename(tmp_path / "models--x" / "blobs")
        for file in blobs.iterdir():
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    with HFCheckpoint(snapshot) as checkpoint:
        assert torch.equal(checkpoint.read("a"), torch.arange(24.0).view(4, 6))
