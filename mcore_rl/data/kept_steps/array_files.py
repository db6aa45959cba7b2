"""Arrays of one step in a safetensors file, with the version of the format and the step in its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mcore_rl.errors import DataError
from model_converters.durable_files import durable_write

FORMAT = "1"
"""Version of the format, raised with any change of names or meanings."""

Arrays = dict[str, np.ndarray]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], **numbers: int) -> None:
    """Write a file that appears complete or not at all. `numbers` are added to the metadata.

    Raises: OSError.
    """
    # safetensors copies the memory of an array, so it must be contiguous. np.ascontiguousarray would change a scalar.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    metadata = {"format": FORMAT} | {name: str(number) for name, number in numbers.items()}
    with durable_write(path) as file:
        file.write(save(contiguous, metadata))


def read_arrays(path: Path, *names: str) -> tuple[Arrays, dict[str, int]]:
    """Read a file. Returns its arrays, and the numbers `names` of its metadata.

    Raises: DataError naming the file if it is missing, damaged, or has another version of the format.
    """
    try:
        with safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
            if "format" not in metadata:
                raise DataError(f"{path} is no file with trajectories of mcore-rl")
            if (found := metadata["format"]) != FORMAT:
                raise DataError(
                    f"{path} has format {found}, but this version of mcore-rl reads format {FORMAT}; use the version "
                    "that wrote it"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
        return arrays, {name: int(metadata[name]) for name in names}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, reason: str) -> DataError:
    """Return the error for a file that cannot be used."""
    return DataError(f"{path} is damaged ({reason}): its step cannot be repeated")
