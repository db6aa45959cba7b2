"""Fixtures for tests of reward functions and judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.rewards.processes import dispatcher
from tests.unit.data.chat.made import byte_tokenizer


@pytest.fixture(scope="module")
def functions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with the FUNCTIONS of the test module."""
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(request.module.FUNCTIONS)
    return path


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graders that ignore an interrupt fail sooner."""
    monkeypatch.setattr(dispatcher, "GRACE_SECONDS", 0.3)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """Tokenizer with one token per byte."""
    path = tmp_path / "tokenizer.json"
    byte_tokenizer(["<|endoftext|>"]).save(str(path))
    return load_tokenizer(path)
