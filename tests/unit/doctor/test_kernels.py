"""Kernels that raise, take their process along or hang are named, and the others are tried all the same."""

from __future__ import annotations

import pytest

from mcore_rl.doctor.kernels import KERNELS, present, trials
from tests.readme import ROOT

BROKEN = "tests.unit.doctor.broken_kernels"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'scripts'}")


def test_what_raises_and_what_dies_is_named_and_the_rest_goes_on() -> None:
    names = ["raises", "dies", "matrix product"]
    answers = dict(trials("cpu", names, module=BROKEN))
    assert list(answers) == names
    assert answers["raises"] == "OSError: libcudnn.so.9: cannot open"
    assert answers["dies"] == "ended its process with exit code -6"
    assert answers["matrix product"] == ""


def test_what_hangs_is_named_in_time() -> None:
    assert list(trials("cpu", ["raises", "hangs"], module=BROKEN, seconds=6)) == [
        ("raises", "OSError: libcudnn.so.9: cannot open"),
        ("hangs", "gave no answer within 12 s"),
    ]


def test_only_what_is_here_is_tried() -> None:
    assert "matrix product" in present()
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
