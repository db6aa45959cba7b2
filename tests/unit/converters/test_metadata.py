"""Metadata of a checkpoint that an older Python wrote: 3.11.0 to 3.11.3 pickle members of an Enum as `getattr`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from model_converters.dcp.blocks import Box, CheckpointChunk, ShardedRankState
from model_converters.dcp.metadata import METADATA_NAME, read_metadata
from model_converters.dcp.writer import plan_files, plan_metadata
from model_converters.errors import ConversionError


class OldPickler(pickle.Pickler):
    """Pickler that writes members of an Enum as Python 3.11.2 does."""

    def reducer_override(self, value: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Attribute:
    """Value that is pickled as an attribute of another object."""

    def __init__(self, owner: object, name: str) -> None:
        self._call = getattr, (owner, name)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def written(directory: Path, planner_data: object) -> Metadata:
    chunk = CheckpointChunk("weight", (2, 3), Box((0, 0), (2, 3)), "a", Box((0, 0), (2, 3)))
    metadata = plan_metadata(list(plan_files(0, ShardedRankState((chunk,), (), {}), {"a": torch.float32}, 10**6)))
    metadata.planner_data, metadata.storage_data = planner_data, {}
    with (directory / METADATA_NAME).open("wb") as file:
        OldPickler(file).dump(metadata)
    return metadata


def test_read_metadata_of_python_3_11_2(tmp_path: Path) -> None:
    metadata = written(tmp_path, WriteItemType.SHARD)
    assert b"getattr" in (tmp_path / METADATA_NAME).read_bytes()
    assert read_metadata(tmp_path) == metadata


@pytest.mark.parametrize(
    ("owner", "name"), [(WriteItemType, "__init__"), (WriteItemType, "mro"), (torch.Size, "numel"), (torch.Size, "x")]
)
def test_read_metadata_other_attributes_are_rejected(owner: object, name: str, tmp_path: Path) -> None:
    written(tmp_path, Attribute(owner, name))
    with pytest.raises(ConversionError, match=f"the attribute '{name}', which is not part of checkpoint metadata"):
        read_metadata(tmp_path)
