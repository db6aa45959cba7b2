"""The doctor lists each tracker with its version and whether it can send."""

from __future__ import annotations

import pytest

from mcore_rl.cli import main
from mcore_rl.doctor import checks as machine
from mcore_rl.doctor import trackers
from mcore_rl.doctor.checks import Check, Need
from mcore_rl.doctor.trackers import check_trackers
from mcore_rl.observe.trackers import check
from mcore_rl.observe.trackers.registry import TRACKERS, TrackerKind


def tracker(login: str | None = None, *, imports: bool = True) -> TrackerKind:
    """A tracker of version 2 and newer."""

    def login_problem() -> str | None:
        if not imports:
            raise ImportError("no libssl\nand more")
        return login

    return TrackerKind(("track-me",), "track", "2", lambda facts: pytest.fail("opened"), login_problem)


@pytest.mark.parametrize(
    ("version", "kind", "ok", "found", "remedy"),
    [
        ("2.1", tracker(), True, "2.1, can send", ""),
        ("2.1", tracker("set TRACK_KEY"), True, "2.1, offline only: set TRACK_KEY", ""),
        ("1.9", tracker(), False, "1.9, too old", 'pip install "track-me>=2"'),
        (None, tracker(imports=False), False, "-", 'pip install "track-me>=2"'),
        ("2.1", tracker(imports=False), False, "installed, but fails: no libssl", trackers.REPAIR),
    ],
)
def test_check_shows_version_and_login(
    monkeypatch: pytest.MonkeyPatch, version: str | None, kind: TrackerKind, ok: bool, found: str, remedy: str
) -> None:
    monkeypatch.setattr(check, "installed_version", lambda kind: version)
    monkeypatch.setattr(trackers, "TRACKERS", {"track": kind})
    assert check_trackers() == [Check("track", ok, found, Need.EXTRA, "observe.trackers=track", remedy)]


def test_doctor_lists_every_tracker_except_in_the_setup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "installed_version", lambda kind: None)
    monkeypatch.setattr(machine, "report", list)
    main(["doctor"])
    listed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("missing ")]
    assert set(TRACKERS) - {"tensorboard"} <= set(listed)  # tensorboard is a requirement of every run
    main(["doctor", "--missing"])
    assert "wandb" not in capsys.readouterr().out
