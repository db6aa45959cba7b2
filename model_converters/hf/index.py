"""Tensors of an HF directory, from the headers of the files in its index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from model_converters.errors import ConversionError, listing
from model_converters.hf.shards import StoredTensor, read_header
from model_converters.inputs import read_object, require_inside

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the listed files, or of model.safetensors if there is no index.

    Raises: ConversionError naming a file that is missing, outside of the directory, damaged, or differs from the index.
    """
    index = directory / INDEX_NAME
    if not os.path.lexists(index):
        return _read_single(directory)
    weight_map = _read_index(index)
    stored: dict[str, StoredTensor] = {}
    problems = []
    # In a fixed order, so that the message does not depend on the index.
    for file_name in sorted(set(weight_map.values())):
        require_inside(directory / file_name, directory)
        header = read_header(directory / file_name)
        named = {name for name, file in weight_map.items() if file == file_name}
        if absent := sorted(named - set(header)):
            problems.append(f"{file_name} lacks {listing(absent)}")
        if unlisted := sorted(set(header) - named):
            problems.append(f"{file_name} holds {listing(unlisted)}, which the index does not place there")
        stored.update(header)
    if problems:
        raise ConversionError(f"{index} does not fit its shards: {'; '.join(problems)}")
    return stored


def _read_single(directory: Path) -> dict[str, StoredTensor]:
    single = directory / SINGLE_NAME
    # A dangling link counts as existing: ignoring it would silently select other files.
    if os.path.lexists(single):
        require_inside(single, directory)
        return read_header(single)
    message = f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}"
    shards = sorted(file.name for file in directory.glob("*.safetensors")) if directory.is_dir() else []
    if shards:
        raise ConversionError(f"{message}; it has {listing(shards)}: add the index of their tensors")
    raise ConversionError(message)


def _read_index(index: Path) -> dict[str, str]:
    require_inside(index, index.parent)
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict):
        raise ConversionError(f"{index} cannot be read as a safetensors index: its weight_map is {_shown(found)}")
    if not found:
        raise ConversionError(f"{index} has an empty weight_map")
    if problems := _bad_places(found):
        raise ConversionError(f"{index}: {listing(problems)}; each value must be the name of a file in this directory")
    return found


def _bad_places(weight_map: Mapping[str, object]) -> list[str]:
    """Return the entries whose value is not a relative path inside the directory."""
    # One entry per place: a wrong index usually repeats it for many tensors.
    places: dict[str, str] = {}
    for name, place in weight_map.items():
        places.setdefault(place if isinstance(place, str) else repr(place), name)
        if not isinstance(place, str):
            return [f"weight_map places {name} in {_shown(place)}"]
    return [f"weight_map places {name} in {place!r}" for place, name in places.items() if not _is_inside(place)]


def _is_inside(place: str) -> bool:
    path = PurePosixPath(place)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in place


def _shown(value: object) -> str:
    return "absent" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
