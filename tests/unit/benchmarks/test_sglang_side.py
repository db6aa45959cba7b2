"""Child process of the benchmark of SGLang's loops."""

from __future__ import annotations

import pytest

from benchmarks.rollout.sglang_side import SHIM
from mcore_rl.engines.sglang.devices import cpu_patches


def test_shim_prepares_the_import_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reports an error of sitecustomize and continues, so SGLang's processes would fail later."""
    calls: list[str] = []
    monkeypatch.setattr(cpu_patches, "prepare", lambda: calls.append("prepare"))
    exec(SHIM, {})
    assert calls == ["prepare"]
