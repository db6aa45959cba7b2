"""The proof that a checkpoint is complete: `complete.json`, written last, lists every file with its size and checksum,
the layout that wrote it, the versions, and every tensor with its dtype and global shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.checksum import file_crc32
from mcore_rl.errors import DamagedCheckpointError
from mcore_rl.types import SavedFile, SavedState

PROOF_FILE = "complete.json"


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
    (directory / PROOF_FILE).write_text(json.dumps(proof, indent=1) + "\n", encoding="utf-8")


def read_proof(directory: Path) -> Proof:
    """The proof, after a look at every file's size. Checksums are the ranks' to compare: each reads its share.

    Raises: DamagedCheckpointError saying what is missing or cut off.
    """
    path = directory / PROOF_FILE
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        listed = written.pop("files")
        files = tuple(SavedFile(name, int(of["bytes"]), int(of["crc32"], 16)) for name, of in listed.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{directory} is damaged: {PROOF_FILE} cannot be read ({error})") from None
    problems = [problem for file in files if (problem := _size_problem(directory, file))]
    if problems:
        more = f" and {len(problems) - 3} more files" if len(problems) > 3 else ""
        raise DamagedCheckpointError(f"{directory} is damaged: {'; '.join(problems[:3])}{more}")
    return Proof(files, written)


def check_file(directory: Path, proof: Proof, name: str) -> None:
    """Raises: DamagedCheckpointError when the file does not hold the bytes that were saved."""
    (expected,) = (file for file in proof.files if file.name == name)
    if _saved(directory, name) != expected:
        raise DamagedCheckpointError(f"{directory} is damaged: {name} has another checksum than was saved")


def _size_problem(directory: Path, file: SavedFile) -> str | None:
    try:
        size = (directory / file.name).stat().st_size
    except OSError:
        return f"{file.name} is missing"
    return None if size == file.num_bytes else f"{file.name} has {size} of {file.num_bytes} bytes"


def _saved(directory: Path, name: str) -> SavedFile:
    crc = file_crc32(directory / name)
    return SavedFile(name, crc.num_bytes, crc.value)
