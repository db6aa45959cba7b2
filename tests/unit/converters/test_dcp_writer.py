"""Plans and files of distributed checkpoints, without Megatron."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from model_converters.dcp.blocks import Box, CheckpointChunk, ShardedRankState, StateObject
from model_converters.dcp.metadata import read_metadata
from model_converters.dcp.reader import DcpReader
from model_converters.dcp.writer import plan_files, plan_metadata, write_file, write_metadata
from model_converters.errors import ConversionError

FLOAT = torch.float32


def chunk(name, start, length, total=8, key="weight"):
    return CheckpointChunk(key, (total, 3), Box((start, 0), (length, 3)), name, Box((0, 0), (length, 3)))


def planned(*chunks, dtypes=None, max_bytes=10**6):
    states = [ShardedRankState((one,), (), {}) for one in chunks]
    dtypes = dtypes or {one.mcore_name: FLOAT for one in chunks}
    return [file for rank, state in enumerate(states) for file in plan_files(rank, state, dtypes, max_bytes)]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk("a", 0, 4), chunk("b", 5, 3)], "weight"),
        ([chunk("a", 0, 4), chunk("b", 3, 5)], "overlapping"),
        ([chunk("a", 0, 4), chunk("b", 4, 5)], "out of bounds"),
        ([chunk("a", 0, 4)], "only parts of weight"),
    ],
    ids=["hole", "overlap", "beyond the end", "one rank's part"],
)
def test_plan_metadata_untiled_tensor_is_rejected(chunks, message):
    with pytest.raises(ConversionError, match=message):
        plan_metadata(planned(*chunks))


def test_plan_metadata_mixed_dtypes_are_rejected():
    files = planned(chunk("a", 0, 4), chunk("b", 4, 4), dtypes={"a": FLOAT, "b": torch.bfloat16})
    with pytest.raises(ConversionError, match=r"a is torch\.float32 and b is torch\.bfloat16"):
        plan_metadata(files)


def test_plan_files_split_at_size_except_larger_tensor():
    chunks = [chunk(str(i), 0, rows, rows, key=str(i)) for i, rows in enumerate((1, 2, 1, 20, 1, 3))]
    state = ShardedRankState(tuple(chunks), (StateObject("state/shard_0_1", b"x"),), {})
    files = list(plan_files(3, state, {one.mcore_name: FLOAT for one in chunks}, 48))
    rows = [[e.content.local.shape[0] for e in f.entries if isinstance(e.content, CheckpointChunk)] for f in files]
    assert rows == [[1, 2, 1], [20], [1, 3]]
    assert [file.name for file in files] == ["__3_0.distcp", "__3_1.distcp", "__3_2.distcp"]
    assert sum(len(file.entries) for file in files) == 7


def test_write_file_is_read_by_torch_and_reader(tmp_path):
    """Two files without CRC; the tensor of one chunk is a view."""
    whole = torch.randn(8, 3)
    files = planned(chunk("a", 0, 5), chunk("b", 5, 3))
    parts = {"a": whole[:5].clone(), "b": whole[5:].clone()}
    told, written = [], []
    metadata = plan_metadata(files)
    spans = {
        file.name: write_file(
            tmp_path,
            file,
            lambda one: parts[one.mcore_name],
            told.append,
            on_write=lambda data: written.append(bytes(data)),
        )
        for file in files
    }
    assert b"".join(written) == b"".join((tmp_path / file.name).read_bytes() for file in files)
    write_metadata(tmp_path, metadata, files, spans)
    assert told == [60, 36]
    assert torch.serialization.get_crc32_options()
    theirs = {"weight": torch.zeros(8, 3)}
    torch.distributed.checkpoint.load(theirs, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(theirs["weight"], whole)
    reader = DcpReader(tmp_path, read_metadata(tmp_path))
    for box in (Box((0, 0), (8, 3)), Box((4, 1), (3, 2)), Box((6, 0), (1, 3))):
        assert torch.equal(reader.read("weight", box), box.view(whole))
    assert str(tmp_path).encode() not in (tmp_path / ".metadata").read_bytes()


@pytest.mark.parametrize("numbers", [3000, 100_000], ids=["when it is flushed", "within an entry"])
def test_write_file_full_disk_raises_oserror(tmp_path, numbers):
    """torch converts errors of write() to a RuntimeError about positions in the file."""
    whole = CheckpointChunk("weight", (numbers,), Box((0,), (numbers,)), "a", Box((0,), (numbers,)))
    (file,) = planned(whole)
    (tmp_path / file.name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path, file, lambda _: torch.zeros(numbers), lambda _: None)
