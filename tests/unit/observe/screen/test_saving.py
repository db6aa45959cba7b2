"""Bytes of a checkpoint in progress, beside the expected size."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.observe.screen import saving
from mcore_rl.observe.screen.board import Work
from mcore_rl.observe.screen.saving import SavedBytes


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(saving, "PART_OF_TIME", 0)


def write(path: Path, num_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))


def test_saved_bytes_first_checkpoint_has_no_fraction(tmp_path: Path) -> None:
    saved = SavedBytes(tmp_path / "checkpoints")
    assert saved.current() is None
    write(tmp_path / "checkpoints" / ".step_2.partial" / "critic" / "__0_0.distcp", 300)
    work = saved.current()
    assert work is not None
    assert (work.name, work.done, work.total) == ("checkpoint of step 2", 300, None)
    assert work.seconds_left(work.since + 5) is None


def test_saved_bytes_are_compared_with_the_newest_checkpoint(tmp_path: Path) -> None:
    for step, size in ((9, 500), (10, 1000)):
        write(tmp_path / f"step_{step}" / "__0_0.distcp", size)
    saved, partial = SavedBytes(tmp_path), tmp_path / ".step_11.partial"
    write(partial / "__0_0.distcp", 250)
    first = saved.current()
    assert first is not None
    assert (first.done, first.total, first.seconds_left(first.since + 5)) == (250, 1000, 15)
    write(partial / "__1_0.distcp", 900)
    second = saved.current()
    assert second is not None
    assert (second.since, second.done, second.total) == (first.since, 1150, 1150)
    partial.rename(tmp_path / "step_11")
    assert saved.current() is None


def test_work_that_has_not_begun_has_no_remaining_time() -> None:
    assert Work("x", 10.0, done=0.0, total=8.0).seconds_left(20.0) is None
    assert Work("x", 10.0, done=2.0, total=8.0).seconds_left(20.0) == 30.0
