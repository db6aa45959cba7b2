"""The proof that a checkpoint is complete: `complete.json`, written last, lists every file with its size and checksum,
the layout that wrote it, the versions, and every tensor with its dtype and global shape. It has a checksum of its own;
proofs of earlier versions lack it.

Damage is found in two places. Before a process starts: the proof, every file's size, the checksums of all files of a
checkpoint of up to `CHECKED_BYTES`; of a larger one the checksums of small files, and both ends of the others, which
costs a few reads per file. While ranks load: the checksums of all files, each rank its share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from zlib import crc32

from mcore_rl.data.checksum import file_crc32
from mcore_rl.errors import DamagedCheckpointError
from mcore_rl.types import SavedFile, SavedState

PROOF_FILE, STATE_FILE = "complete.json", "state.json"
CHECKED_BYTES = 8 * 2**30
"""Files up to this total are read whole before processes start: some seconds."""
_SMALL_BYTES = 64 * 2**20
_OWN_CHECKSUM = "crc32"
# Blocks are saved by torch.save, as zip archives one after the other.
_BLOCKS, _FIRST_BYTES, _LAST_BYTES = ".distcp", b"PK\x03\x04", b"PK\x05\x06"
_LAST_RECORD_BYTES = 22


@dataclass(frozen=True)
class Proof:
    """`files` are all files of the checkpoint but the proof itself."""

    files: tuple[SavedFile, ...]
    description: dict[str, Any]


def write_proof(directory: Path, saved: SavedState, others: Sequence[str]) -> None:
    """Writes the proof of what the ranks saved and of the files `others` that lie beside it.

    Raises: OSError.
    """
    files = [*saved.files, *(_saved(directory, name) for name in others)]
    listed = {file.name: {"bytes": file.num_bytes, "crc32": f"{file.crc32:08x}"} for file in files}
    proof = {"files": listed, **saved.description}
    proof[_OWN_CHECKSUM] = _own_checksum(proof)
    (directory / PROOF_FILE).write_text(json.dumps(proof, indent=1) + "\n", encoding="utf-8")


def read_proof(directory: Path) -> Proof:
    """The proof, after a look at every file's size. Checksums are the ranks' to compare: each reads its share.

    Raises: DamagedCheckpointError saying what is missing or cut off.
    """
    try:
        written = _read(directory / PROOF_FILE)
        listed = written.pop("files")
        files = tuple(SavedFile(name, int(of["bytes"]), int(of["crc32"], 16)) for name, of in listed.items())
        outside = [file.name for file in files if not _is_inside(file.name)]
        if outside or STATE_FILE not in listed:
            raise ValueError(f"it lists {outside[0]}" if outside else f"it does not list {STATE_FILE}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedCheckpointError(f"{directory} is damaged: {PROOF_FILE} cannot be read ({error})") from None
    problems = [problem for file in files if (problem := _size_problem(directory, file))]
    if problems:
        more = f" and {len(problems) - 3} more files" if len(problems) > 3 else ""
        raise DamagedCheckpointError(f"{directory} is damaged: {'; '.join(problems[:3])}{more}")
    return Proof(files, written)


def _read(path: Path) -> dict[str, Any]:
    """Raises: ValueError for another checksum than its own; OSError."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    checksum = written.pop(_OWN_CHECKSUM, None)
    if checksum is not None and checksum != _own_checksum(written):
        raise ValueError("it has another checksum than was saved")
    return written


def _own_checksum(proof: dict[str, Any]) -> str:
    """Independent of the order of keys and of white space."""
    return f"{crc32(json.dumps(proof, sort_keys=True).encode()):08x}"


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def check_content(directory: Path, proof: Proof) -> None:
    """Looks for damage as far as one process can before the others start (see above).

    Raises: DamagedCheckpointError naming the files.
    """
    whole = sum(file.num_bytes for file in proof.files) <= CHECKED_BYTES
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(lambda file: _damage(directory, file, whole=whole), proof.files))
    found = [problem for problem in problems if problem is not None]
    if found:
        more = f" and {len(found) - 3} more files" if len(found) > 3 else ""
        raise DamagedCheckpointError(f"{directory} is damaged: {'; '.join(found[:3])}{more}")


def _damage(directory: Path, file: SavedFile, *, whole: bool) -> str | None:
    try:
        if whole or file.num_bytes <= _SMALL_BYTES:
            return None if _saved(directory, file.name) == file else f"{file.name} has another checksum than was saved"
        with (directory / file.name).open("rb") as opened:
            first = opened.read(len(_FIRST_BYTES))
            opened.seek(-_LAST_RECORD_BYTES, os.SEEK_END)
            last = opened.read(len(_LAST_BYTES))
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    if file.name.endswith(_BLOCKS) and (first, last) != (_FIRST_BYTES, _LAST_BYTES):
        return f"{file.name} begins or ends with other bytes than a block"
    return None


def check_file(directory: Path, proof: Proof, name: str) -> None:
    """Raises: DamagedCheckpointError when the file does not hold the bytes that were saved."""
    (expected,) = (file for file in proof.files if file.name == name)
    problem = _damage(directory, expected, whole=True)
    if problem is not None:
        raise DamagedCheckpointError(f"{directory} is damaged: {problem}")


def _size_problem(directory: Path, file: SavedFile) -> str | None:
    try:
        size = (directory / file.name).stat().st_size
    except OSError:
        return f"{file.name} is missing"
    return None if size == file.num_bytes else f"{file.name} has {size} of {file.num_bytes} bytes"


def _saved(directory: Path, name: str) -> SavedFile:
    crc = file_crc32(directory / name)
    return SavedFile(name, crc.num_bytes, crc.value)
