"""Batches of trained steps in files: what is read back trains the same, and damaged files are named."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.schema import Config
from mcore_rl.data.kept_steps.array_files import FORMAT, read_arrays, write_arrays
from mcore_rl.data.kept_steps.reader import KeptStep, read_step
from mcore_rl.data.kept_steps.writers import RESPONSES, ResponseWriter, TrajectoryWriter, kept_steps
from mcore_rl.data.trajectories import join_rows, take_rows
from mcore_rl.errors import DataError
from mcore_rl.runtime.delivery import rows_by_rank
from mcore_rl.trainer.batches import batch_builder
from mcore_rl.types import Batch, BuffersRef, Groups, RolloutScalars, TrajectoryBuffers
from tests.unit.data.test_trajectories import buffers, columns
from tests.unit.rollouts import scalars_of

STEP, DP_RANKS = 7, 2
KEPT = (np.array([0, 1, 4]), np.array([2, 3, 1]))
"""Trained rows of each chunk, two groups of three responses."""


def scalars(of: TrajectoryBuffers, group: int) -> RolloutScalars:
    lengths = np.diff(of.response_offsets).astype(np.int32)
    made = scalars_of(np.full(len(lengths), group), lengths, np.arange(len(lengths)) / 3)
    return replace(made, total_tokens=np.diff(of.token_offsets).astype(np.int32))


def config(advantage: str) -> Config:
    made = Config()
    made.algorithm.advantage = advantage
    made.trainer.prompts_per_update, made.trainer.update_epochs = 1, 2
    return made


def groups(chunks: tuple[TrajectoryBuffers, ...]) -> Groups:
    greedy = (scalars_of([9, 5], rewards=[0.5, 0.25]),)
    refs = tuple(BuffersRef(chunk) for chunk in chunks)
    return Groups(refs, tuple(scalars(chunk, group) for chunk, group in zip(chunks, (5, 9), strict=True)), KEPT, greedy)


def write(directory: Path, made: Groups, chunks: tuple[TrajectoryBuffers, ...], step: int = STEP) -> Batch:
    """Write a step like the driver and two data-parallel ranks; return its batch."""
    batch = batch_builder(config("remax"), DP_RANKS)(made, step, step - 1)
    ResponseWriter(directory, 2).begin(made, step, step - 1)
    rows, places = rows_by_rank(batch, DP_RANKS)
    for rank, share in enumerate(batch.shares(DP_RANKS, places)):
        # A rank receives its rows as one chunk.
        parts = np.split(rows[rank].rows, rows[rank].offsets[1:-1])
        own = [take_rows(chunks[chunk], of_chunk) for chunk, of_chunk in zip(rows[rank].chunks, parts, strict=True)]
        TrajectoryWriter(directory, rank).write(share.by_update(), [join_rows(own)])
    return batch


@pytest.fixture
def chunks() -> tuple[TrajectoryBuffers, ...]:
    return buffers(), replace(buffers(5), temperatures=np.array(0.5, np.float32))


@pytest.fixture
def written(tmp_path: Path, chunks: tuple[TrajectoryBuffers, ...]) -> Path:
    write(tmp_path, groups(chunks), chunks)
    return tmp_path


@pytest.mark.parametrize("advantage", ["grpo", "remax"])
def test_read_step_gives_the_batch_that_was_trained(
    written: Path, chunks: tuple[TrajectoryBuffers, ...], advantage: str
) -> None:
    build, made = batch_builder(config(advantage), DP_RANKS), groups(chunks)
    trained, kept = build(made, STEP, STEP - 1), read_step(written, STEP)
    repeated = build(kept.groups(BuffersRef(kept.trajectories)), STEP, kept.version)
    for field in fields(Batch):
        if field.name not in ("chunks", "chunk_ids", "rows"):
            assert np.array_equal(getattr(repeated, field.name), getattr(trained, field.name)), field.name
    assert len(trained) == 6
    for sample, (chunk, row) in enumerate(zip(trained.chunk_ids, trained.rows, strict=True)):
        assert columns(kept.trajectories, repeated.rows[sample]) == columns(chunks[chunk], row)


def test_read_step_keeps_episodes_and_temperatures(tmp_path: Path, chunks: tuple[TrajectoryBuffers, ...]) -> None:
    made = groups(chunks)
    # Responses 0 and 1 of the first chunk are one episode.
    several = replace(made.scalars[0], episodes=np.array([0, 0, 2, 3, 4]))
    write(tmp_path, replace(made, scalars=(several, made.scalars[1])), chunks)
    kept: KeptStep = read_step(tmp_path, STEP)
    assert kept.responses.episodes is not None
    assert len(set(kept.responses.episodes.tolist())) == 5
    assert kept.responses.episodes[0] == kept.responses.episodes[1]
    temperatures = kept.trajectories.temperatures
    assert temperatures is not None
    first = kept.trajectories.response_offsets[3]
    assert np.isnan(temperatures[:first]).all()
    assert (temperatures[first:] == 0.5).all()


def test_begin_keeps_the_last_steps_and_none_that_are_repeated(
    tmp_path: Path, chunks: tuple[TrajectoryBuffers, ...]
) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, groups(chunks), chunks, step)
    assert kept_steps(tmp_path) == [3, 4]
    # The run resumes after step 2: its new step 3 replaces the old one.
    (tmp_path / ".step_2.removed").mkdir()
    ResponseWriter(tmp_path, 2).begin(groups(chunks), 3, 2)
    assert kept_steps(tmp_path) == [3]
    assert [path.name for path in tmp_path.rglob("*") if path.name != "step_3"] == [RESPONSES]


def test_files_that_cannot_be_written_do_not_end_the_run(
    tmp_path: Path, chunks: tuple[TrajectoryBuffers, ...], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "file"
    directory.write_text("")
    with caplog.at_level(logging.WARNING):
        write(directory, groups(chunks), chunks)
    assert len(caplog.messages) == 1 + DP_RANKS
    assert all("step_7" in message and "cannot be written: " in message for message in caplog.messages)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def other_format(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(f'"format":"{FORMAT}"'.encode(), b'"format":"9"'))


def change(path: Path, name: str, value: np.ndarray) -> None:
    arrays, numbers = read_arrays(path, "step")
    write_arrays(path, arrays | {name: value}, **numbers)


@pytest.mark.parametrize("name", [RESPONSES, "rank_1.safetensors"])
def test_read_step_damaged_file_is_named(written: Path, name: str) -> None:
    path = written / f"step_{STEP}" / name
    content = path.read_bytes()
    cases = [
        (cut, "is damaged "),
        (other_format, "has format 9, but this version of mcore-rl reads format 1; use the version that wrote it"),
        (lambda path: path.write_text("no safetensors"), "is damaged "),
        (lambda path: path.write_bytes(b""), "is damaged "),
    ]
    for damage, message in cases:
        damage(path)
        with pytest.raises(DataError, match=rf"^{path} {message}"):
            read_step(written, STEP)
        path.write_bytes(content)
    read_step(written, STEP)


def test_read_step_missing_trajectories_are_counted(written: Path) -> None:
    folder = written / f"step_{STEP}"
    (folder / "rank_1.safetensors").unlink()
    with pytest.raises(DataError, match=rf"^{folder} has trajectories of 3 of 6 responses; "):
        read_step(written, STEP)
    (folder / RESPONSES).unlink()
    with pytest.raises(DataError, match=rf"^{folder / RESPONSES} cannot be read: "):
        read_step(written, STEP)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_offsets", np.array([0, 9, 2, 10]), "offsets"),
        ("response_offsets", np.zeros(2, np.int64), "offsets"),
        ("logp_rollout", np.zeros(2, np.float32), "logp_rollout has another length"),
        ("tokens", np.zeros(200, np.int64), "tokens is unknown or has another type"),
        ("prompt_tokens", np.array([9, 9, 9], np.int32), "do not add up"),
        ("kept_words", np.zeros(3, np.int32), "it has only one of kept_words and kept_offsets"),
        ("samples", np.zeros((), np.int64), "samples is missing or has another type"),
        ("code", np.zeros(2, np.int32), "code is unknown"),
    ],
)
def test_read_step_arrays_that_ranks_would_misread_are_rejected(
    written: Path, name: str, value: np.ndarray, message: str
) -> None:
    path = written / f"step_{STEP}" / "rank_0.safetensors"
    change(path, name, value)
    with pytest.raises(DataError, match=rf"^{path} is damaged .*{message}"):
        read_step(written, STEP)


def test_read_step_columns_of_different_lengths_are_rejected(written: Path) -> None:
    path = written / f"step_{STEP}" / RESPONSES
    change(path, "rewards", np.zeros(2, np.float32))
    with pytest.raises(DataError, match=r"is damaged"):
        read_step(written, STEP)


def test_read_step_files_of_different_kinds_are_rejected(written: Path) -> None:
    path = written / f"step_{STEP}" / "rank_1.safetensors"
    change(path, "routed_experts", read_arrays(path)[0]["routed_experts"][:, :1])
    with pytest.raises(DataError, match=r"its files do not belong together"):
        read_step(written, STEP)
