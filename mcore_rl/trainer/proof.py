"""Proof that a checkpoint is complete: `complete.json`.

The file is written last. It lists every file with size and checksum, the layout and versions that wrote it, and every
tensor with dtype and global shape. It has its own checksum, except in checkpoints of early versions.

Damage is detected in two places. Before processes start, the driver checks the proof, the size of every file, and the
checksums of all files if the checkpoint has up to `CHECKED_BYTES`. In larger checkpoints it checks the checksums of
small files and the first and last bytes of large ones (a few reads per file). While ranks load, each verifies the
checksums of its share of all files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypedDict
from zlib import crc32

from mcore_rl.data.checksum import saved_file
from mcore_rl.errors import DamagedCheckpointError
from mcore_rl.types import SavedFile, SavedState

PROOF_FILE, STATE_FILE = "complete.json", "state.json"
CHECKED_BYTES = 8 * 2**30
"""Checkpoints up to this size are read completely before processes start, which takes some seconds."""
_SMALL_BYTES = 64 * 2**20
_OWN_CHECKSUM = "crc32"
# torch.distributed.checkpoint writes .distcp files as a sequence of zip archives (torch.save).
_BLOCKS, _FIRST_BYTES, _LAST_BYTES = ".distcp", b"PK\x03\x04", b"PK\x05\x06"
_LAST_RECORD_BYTES = 22


class _ListedFile(TypedDict):
    bytes: int
    crc32: str


def write_proof(directory: Path, saved: SavedState, others: Sequence[str]) -> None:
    """Write the proof for the files saved by the ranks and the other files `others` in the directory.

    Raises: OSError.
    """
    files = [*saved.files, *(saved_file(directory, name) for name in others)]
    listed = {file.name: {"bytes": file.num_bytes, "crc32": f"{file.crc32:08x}"} for file in files}
    proof = {"files": listed, **saved.description}
    text = json.dumps({**proof, _OWN_CHECKSUM: _own_checksum(proof)}, indent=1)
    (directory / PROOF_FILE).write_text(text + "\n", encoding="utf-8")


def read_proof(directory: Path) -> tuple[SavedFile, ...]:
    """Compare the size of every file, and return all files except the proof. Ranks compare checksums later.

    Raises: DamagedCheckpointError naming missing or truncated files.
    """
    try:
        listed = _read(directory / PROOF_FILE)
        files = tuple(SavedFile(name, int(of["bytes"]), int(of["crc32"], 16)) for name, of in listed.items())
        outside = [file.name for file in files if not _is_inside(file.name)]
        if outside or STATE_FILE not in listed:
            raise ValueError(f"it lists {outside[0]}" if outside else f"it does not list {STATE_FILE}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedCheckpointError(f"{directory} is damaged: {PROOF_FILE} cannot be read ({error})") from None
    _require_sound(directory, [_size_problem(directory, file) for file in files])
    return files


def _require_sound(directory: Path, found: Sequence[str | None]) -> None:
    """Raise DamagedCheckpointError if a file has a problem; the message has up to three of them."""
    problems = [problem for problem in found if problem is not None]
    if problems:
        more = f" and {len(problems) - 3} more files" if len(problems) > 3 else ""
        raise DamagedCheckpointError(f"{directory} is damaged: {'; '.join(problems[:3])}{more}")


def _read(path: Path) -> dict[str, _ListedFile]:
    """Read the listed files by name. Raises: ValueError if its own checksum does not match; OSError; KeyError."""
    if not path.is_file():
        raise ValueError("it is not a regular file")
    written = json.loads(path.read_text(encoding="utf-8"))
    checksum = written.pop(_OWN_CHECKSUM, None)
    if checksum is not None and checksum != _own_checksum(written):
        raise ValueError("it has another checksum than was saved")
    files: dict[str, _ListedFile] = written["files"]
    return files


def _own_checksum(proof: Mapping[str, object]) -> str:
    """Return a checksum that does not depend on the order of keys or on white space."""
    return f"{crc32(json.dumps(proof, sort_keys=True).encode()):08x}"


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    # A damaged proof must not make a run read files elsewhere.
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def check_content(directory: Path, files: Sequence[SavedFile]) -> None:
    """Check for damage before other processes start, as far as one process can (see the module's docstring).

    Raises: DamagedCheckpointError naming the files.
    """
    # Reading a checkpoint of many GiB in one process would delay the start; its ranks read it in parallel anyway.
    whole = sum(file.num_bytes for file in files) <= CHECKED_BYTES
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        _require_sound(directory, list(pool.map(lambda file: _damage(directory, file, whole=whole), files)))


def _damage(directory: Path, file: SavedFile, *, whole: bool) -> str | None:
    try:
        if whole or file.num_bytes <= _SMALL_BYTES:
            same = saved_file(directory, file.name) == file
            return None if same else f"{file.name} has another checksum than was saved"
        # A file that was cut off or overwritten from the start is found with two reads. Ranks compare the rest while
        # they load.
        with (directory / file.name).open("rb") as opened:
            first = opened.read(len(_FIRST_BYTES))
            opened.seek(-_LAST_RECORD_BYTES, os.SEEK_END)
            last = opened.read(len(_LAST_BYTES))
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    if file.name.endswith(_BLOCKS) and (first, last) != (_FIRST_BYTES, _LAST_BYTES):
        return f"{file.name} does not begin and end like a zip archive"
    return None


def check_file(directory: Path, files: Sequence[SavedFile], name: str) -> None:
    """Raise DamagedCheckpointError if the file does not have the saved checksum."""
    (expected,) = (file for file in files if file.name == name)
    _require_sound(directory, [_damage(directory, expected, whole=True)])


def _size_problem(directory: Path, file: SavedFile) -> str | None:
    try:
        size = (directory / file.name).stat().st_size
    except OSError:
        return f"{file.name} is missing"
    return None if size == file.num_bytes else f"{file.name} has {size} of {file.num_bytes} bytes"
