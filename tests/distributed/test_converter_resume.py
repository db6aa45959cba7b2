"""Resuming of killed conversions, and peak memory of conversions."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.distributed import converting
from tests.distributed.launch import RankFailedError
from tests.tiny_models import tiny_fields, write_tiny_model

SIZES = {"world_size": 4, "tp": 2, "pp": 2, "ep": 2}
MAX_FILE_BYTES = 20_000


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "hf", "qwen3_moe")


@pytest.fixture(scope="module")
def uninterrupted(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Contents of all files of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "out"
    converting.to_mcore(hf, out, SIZES, MAX_FILE_BYTES)
    return _content(out)


def _content(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def _convert_and_die(hf: Path, out: Path, num_files: int, num_entries: int) -> None:
    """Kill the conversion after num_files files and num_entries entries of the next file."""
    from model_converters.dcp import convert as checkpoint
    from model_converters.mapping.layout import TrainLayout

    write_file, written = checkpoint.write_file, []

    def counting(directory: Any, file: Any, tensor_of: Any, advance: Any) -> Any:
        entries = []

        def dying(chunk: Any) -> Any:
            entries.append(chunk)
            if len(written) == num_files and len(entries) > num_entries:
                os.kill(os.getpid(), signal.SIGKILL)
            return tensor_of(chunk)

        spans = write_file(directory, file, dying, advance)
        written.append(file.name)
        return spans

    checkpoint.write_file = counting
    checkpoint.to_mcore(hf, out, TrainLayout(**SIZES), max_file_bytes=MAX_FILE_BYTES)


@pytest.mark.parametrize(("num_files", "num_entries"), [(0, 0), (1, 2), (7, 0), (9, 3)])
def test_to_mcore_after_kill_writes_only_missing_files(
    num_files: int, num_entries: int, hf: Path, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    with pytest.raises(RankFailedError, match="exit code -9"):
        converting.alone(_convert_and_die, hf, out, num_files, num_entries)
    assert not out.exists()
    notes = [json.loads(line)["file"] for line in _lines(partial / "finished.jsonl")]
    assert len(notes) == num_files
    before = {name: (partial / name).stat() for name in notes}
    code, _, errors = converting.cli("to-mcore", "--hf", hf, "--out", out, *_flags())
    assert code == 0
    assert (f"{num_files} of " in errors) == bool(num_files)
    for name, stat in before.items():
        after = (out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert _content(out) == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _flags() -> list[str]:
    sizes = ["--tp", "2", "--pp", "2", "--ep", "2", "--max-file-gib", str(MAX_FILE_BYTES / 2**30)]
    return [*sizes, "--logits", "never"]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def killed(hf: Path, tmp_path: Path) -> Path:
    """Partial directory of a conversion with five finished files."""
    with pytest.raises(RankFailedError, match="exit code -9"):
        converting.alone(_convert_and_die, hf, tmp_path / "out", 5, 1)
    return tmp_path / ".out.partial"


@pytest.mark.parametrize("damage", ["file cut", "file gone", "note cut", "notes gone"])
def test_to_mcore_resume_rewrites_damaged_files(
    damage: str, killed: Path, hf: Path, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    notes = killed / "finished.jsonl"
    first = killed / json.loads(_lines(notes)[0])["file"]
    if damage == "file cut":
        os.truncate(first, first.stat().st_size - 1)
    elif damage == "file gone":
        first.unlink()
    elif damage == "note cut":
        os.truncate(notes, notes.stat().st_size - 9)
    else:
        notes.unlink()
    code, _, errors = converting.cli("to-mcore", "--hf", hf, "--out", tmp_path / "out", *_flags())
    assert code == 0
    assert ("4 of " in errors) == (damage != "notes gone")
    assert _content(tmp_path / "out") == uninterrupted


def test_to_mcore_other_conversion_does_not_resume(killed: Path, hf: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", "qwen3_moe", seed=1)
    before = _content(killed)
    for source, flags, differing in (
        (other, _flags(), "source"),
        (hf, ["--ep", "2"], "layout, files"),
        (hf, [*_flags(), "--max-file-gib", "1"], "files"),
    ):
        code, _, errors = converting.cli("to-mcore", "--hf", source, "--out", tmp_path / "out", *flags)
        assert code == 2
        assert f"holds an unfinished conversion with another {differing};" in errors
    assert _content(killed) == before


def test_to_mcore_concurrent_conversion_is_rejected(killed: Path, hf: Path, tmp_path: Path) -> None:
    import fcntl

    holder = os.open(killed, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        code, _, errors = converting.cli("to-mcore", "--hf", hf, "--out", tmp_path / "out", *_flags())
    finally:
        os.close(holder)
    assert code == 2
    assert "another process is writing" in errors
    assert killed.is_dir()


def _on_a_small_disk(hf: Path, out: Path) -> tuple[int, str, str]:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    shutil.disk_usage = lambda _: usage(10**6, 10**6 - 100_000, 100_000)  # type: ignore[assignment]
    return converting._cli(("to-mcore", "--hf", str(hf), "--out", str(out), *_flags()))


def test_to_mcore_small_disk_is_rejected_before_writing(hf: Path, tmp_path: Path) -> None:
    code, _, errors = converting.alone(_on_a_small_disk, hf, tmp_path / "out")
    assert code == 2
    assert "0.00 GiB free" in errors
    assert list(tmp_path.iterdir()) == []


def test_to_mcore_resume_on_small_disk_keeps_finished_files(killed: Path, hf: Path, tmp_path: Path) -> None:
    before = _content(killed)
    code, _, errors = converting.alone(_on_a_small_disk, hf, tmp_path / "out")
    assert code == 2
    assert "GiB free" in errors
    assert _content(killed) == before


def _on_a_disk_that_fills(hf: Path, out: Path) -> tuple[int, str, str]:
    from model_converters.dcp import convert as checkpoint

    write_file, written = checkpoint.write_file, []

    def failing(directory: Any, file: Any, *rest: Any) -> Any:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(file)
        return write_file(directory, file, *rest)

    checkpoint.write_file = failing
    return converting._cli(("to-mcore", "--hf", str(hf), "--out", str(out), *_flags()))


def test_to_mcore_full_disk_keeps_finished_files(hf: Path, uninterrupted: dict[str, bytes], tmp_path: Path) -> None:
    code, _, errors = converting.alone(_on_a_disk_that_fills, hf, tmp_path / "out")
    assert code == 2
    assert "No space left on device" in errors
    assert ".out.partial keeps the finished files" in errors
    code, _, errors = converting.cli("to-mcore", "--hf", hf, "--out", tmp_path / "out", *_flags())
    assert (code, "3 of " in errors) == (0, True)
    assert _content(tmp_path / "out") == uninterrupted


# ---- memory ----

LARGE = {
    "vocab_size": 512,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9216,
}
LARGEST_BYTES = 2048 * 9216 * 4
M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
SLACK_BYTES = 64 * 2**20


def _growth(verb: str, arguments: tuple[str, ...]) -> int:
    """Return the growth of this process's peak memory in bytes."""
    import mcore_rl.megatron.model.sharded  # noqa: F401  exclude the import from the measurement
    from model_converters.cli import main

    # Without this, malloc keeps a varying number of freed blocks of up to 32 MiB.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20) == 1
    Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main((verb, *arguments)) == 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.fixture
def large_hf(tmp_path: Path) -> Iterator[Path]:
    """Checkpoint six times as large as its largest tensor. Everything in tmp_path is removed after the test."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = tiny_fields("qwen3", **LARGE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    tensors = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    assert sum(tensor.nbytes for tensor in tensors.values()) > 6 * LARGEST_BYTES
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text(json.dumps(fields))
    del tensors
    yield hf
    for directory in tmp_path.iterdir():
        shutil.rmtree(directory)


@pytest.mark.slow
def test_conversion_memory_is_bounded_by_largest_tensor(large_hf: Path, tmp_path: Path) -> None:
    mcore = tmp_path / "mcore"
    there = ("--hf", str(large_hf), "--out", str(mcore), "--tp", "2", "--logits", "never")
    back = ("--ckpt", str(mcore), "--out", str(tmp_path / "back"))
    grown = {
        "to-mcore": converting.alone(_growth, "to-mcore", there),
        "verify": converting.alone(_growth, "verify", ("--hf", str(large_hf), "--ckpt", str(mcore))),
        "to-hf": converting.alone(_growth, "to-hf", back),
    }
    # Verification also reads the tensor from the other checkpoint.
    largest = {"to-mcore": 2, "to-hf": 2, "verify": 3}
    bounds = {verb: count * LARGEST_BYTES + SLACK_BYTES for verb, count in largest.items()}
    assert {verb: num_bytes for verb, num_bytes in grown.items() if num_bytes > bounds[verb]} == {}
