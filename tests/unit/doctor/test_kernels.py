"""Kernels that raise, end their process or hang are named, and all other kernels are still tried."""

from __future__ import annotations

import pytest

from mcore_rl.doctor.kernels import present, trials
from tests.readme import ROOT

BROKEN = "tests.unit.doctor.broken_kernels"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'scripts'}")


def test_trials_name_failing_kernels_and_continue() -> None:
    names = ["raises", "dies", "matrix product"]
    answers = dict(trials("cpu", names, module=BROKEN))
    assert list(answers) == names
    assert answers["raises"] == "OSError: libcudnn.so.9: cannot open"
    assert answers["dies"] == "ended its process with exit code -6"
    assert answers["matrix product"] == ""


@pytest.mark.slow
def test_trials_name_hanging_kernel_after_timeout() -> None:
    assert list(trials("cpu", ["raises", "hangs"], module=BROKEN, seconds=6)) == [
        ("raises", "OSError: libcudnn.so.9: cannot open"),
        ("hangs", "gave no answer within 12 s"),
    ]


def test_trials_call_installed_kernels_only() -> None:
    assert "matrix product" in present()
