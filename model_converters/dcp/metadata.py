"""Reads `.metadata` of torch.distributed.checkpoint, a pickle, without trusting it.

Only the classes that such metadata is made of can come out of it; naming anything else is an error, found before the
pickle is executed past that name.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from model_converters.errors import ConversionError

METADATA_NAME = ".metadata"

_ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # megatron's writer keeps the plans of its ranks beside the metadata.
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata is made of")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to data outside itself")


def read_metadata(directory: Path) -> Metadata:
    """The metadata of a checkpoint; every extent in it is checked against itself and the sizes of the files.

    Raises: ConversionError naming the file and the tensor: missing, not metadata, or not all there.
    """
    file = directory / METADATA_NAME
    try:
        with file.open("rb") as stream:
            metadata = _unpickle(stream)
    except FileNotFoundError:
        raise ConversionError(_no_checkpoint(directory)) from None
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # a pickle can raise anything
        raise ConversionError(f"{file} is not the metadata of a distributed checkpoint: {error}") from error
    try:
        _check(metadata)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConversionError(f"{file} is damaged: {error}") from error
    return metadata


def _unpickle(stream: BinaryIO) -> Metadata:
    metadata = _MetadataUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    return metadata


def _no_checkpoint(directory: Path) -> str:
    message = f"{directory} is no distributed checkpoint: it has no {METADATA_NAME}"
    metadata_files = [*directory.glob(f"*/{METADATA_NAME}"), *directory.glob(f"*/*/{METADATA_NAME}")]
    inside = sorted(str(file.parent.relative_to(directory)) for file in metadata_files)
    return message + (f"; these in it have: {', '.join(inside)}" if inside else "")


def _check(metadata: Metadata) -> None:
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            continue
        _require(isinstance(key, str) and isinstance(stored, TensorStorageMetadata), f"{key!r} is no tensor")
        _require(isinstance(stored.properties, TensorProperties), f"{key} has no properties")
        _require(isinstance(stored.properties.dtype, torch.dtype), f"{key} has no dtype")
        _check_sizes(key, stored.size)
        for chunk in stored.chunks:
            _require(isinstance(chunk, ChunkStorageMetadata), f"{key} has a chunk that is none")
            _check_sizes(key, chunk.offsets)
            _check_sizes(key, chunk.sizes)
            _require(len(chunk.offsets) == len(chunk.sizes) == len(stored.size), f"{key} has a chunk of another rank")
            ends = (start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            _require(all(end <= size for end, size in zip(ends, stored.size, strict=True)), f"{key} overflows")
    for index, place in metadata.storage_data.items():
        _require(isinstance(index, MetadataIndex) and isinstance(place, _StorageInfo), f"{index!r} has no place")
        name = place.relative_path
        _require(isinstance(name, str) and name == Path(name).name and name != "..", f"{index.fqn} lies in {name!r}")
        _check_sizes(index.fqn, (place.offset, place.length))
        _require(not place.transform_descriptors, f"{index.fqn} is compressed or encrypted")


def _check_sizes(key: str, sizes: Any) -> None:
    _require(isinstance(sizes, tuple) and all(type(n) is int and n >= 0 for n in sizes), f"{key} has sizes {sizes!r}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
