"""Safe reader of `.metadata` of torch.distributed.checkpoint, which is a pickle.

The unpickler accepts only the classes that DCP metadata consists of. Any other name raises an error before the object
is created.
"""

from __future__ import annotations

import pickle
from enum import EnumMeta
from pathlib import Path

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from model_converters.errors import ConversionError

METADATA_NAME = ".metadata"

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath Path",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
    f"{_DCP}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING",
    # Megatron's writer also stores the save plans of its ranks.
    f"{_DCP}.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
}
"""Module -> names in it that a checkpoint's metadata may contain, separated by spaces."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        # Dtypes are pickled as attributes of the module torch.
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not part of checkpoint metadata")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("it refers to external data")


def _enum_member(owner: object, name: object) -> object:
    """Return a member of an Enum. Replaces `getattr`, with which Python 3.11.0 to 3.11.3 pickle members."""
    if isinstance(owner, EnumMeta) and isinstance(name, str) and name in owner.__members__:
        return owner.__members__[name]
    raise pickle.UnpicklingError(f"it contains the attribute {name!r}, which is not part of checkpoint metadata")


def read_metadata(directory: Path) -> Metadata:
    """Read the metadata of a checkpoint and check the shapes, chunk extents and file names in it.

    Raises: ConversionError naming the file and the tensor, if the file is missing, not metadata, or damaged.
    """
    file = directory / METADATA_NAME
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it contains a {type(metadata).__name__}")
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


def _no_checkpoint(directory: Path) -> str:
    message = f"{directory} is not a distributed checkpoint: it has no {METADATA_NAME}"
    metadata_files = [*directory.glob(f"*/{METADATA_NAME}"), *directory.glob(f"*/*/{METADATA_NAME}")]
    inside = sorted(str(file.parent.relative_to(directory)) for file in metadata_files)
    return message + (f"; these subdirectories have one: {', '.join(inside)}" if inside else "")


def _check(metadata: Metadata) -> None:
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, dcp.BytesStorageMetadata):
            continue
        _require(isinstance(key, str) and isinstance(stored, dcp.TensorStorageMetadata), f"{key!r} is not a tensor")
        _require(isinstance(stored.properties, dcp.TensorProperties), f"{key} has no properties")
        _require(isinstance(stored.properties.dtype, torch.dtype), f"{key} has no dtype")
        _check_sizes(key, stored.size)
        for chunk in stored.chunks:
            _require(isinstance(chunk, dcp.ChunkStorageMetadata), f"{key} has an invalid chunk")
            _check_sizes(key, chunk.offsets)
            _check_sizes(key, chunk.sizes)
            same_ndim = len(chunk.offsets) == len(chunk.sizes) == len(stored.size)
            _require(same_ndim, f"{key} has a chunk with another number of dimensions")
            ends = (start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            fits = all(end <= size for end, size in zip(ends, stored.size, strict=True))
            _require(fits, f"a chunk of {key} exceeds the tensor")
    for index, place in metadata.storage_data.items():
        _require(isinstance(index, dcp.MetadataIndex) and isinstance(place, _StorageInfo), f"{index!r} has no location")
        name = place.relative_path
        in_directory = isinstance(name, str) and name == Path(name).name and name != ".."
        _require(in_directory, f"{index.fqn} is stored in {name!r}, outside the checkpoint")
        # The reader passes offset and length to the file as they are.
        _check_sizes(index.fqn, (place.offset, place.length))
        _require(not place.transform_descriptors, f"{index.fqn} is compressed or encrypted")


def _check_sizes(key: str, sizes: object) -> None:
    _require(isinstance(sizes, tuple) and all(type(n) is int and n >= 0 for n in sizes), f"{key} has sizes {sizes!r}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
