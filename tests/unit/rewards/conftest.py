"""Tokenizer of judges and policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.tokenizer import load_tokenizer
from tests.unit.data.conftest import byte_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """Tokenizer with one token per byte."""
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return load_tokenizer(path)
