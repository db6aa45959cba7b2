"""SGLang's environment is known by its files alone, and no other version of it will do."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.rules.available import SGLANG_PYTHON, SGLANG_VERSION, missing_engine, sglang_version
from mcore_rl.config.schema import Config
from mcore_rl.doctor.checks import check_sglang

ROOT = Path(__file__).parents[3]


def environment(directory: Path, version: str | None) -> Path:
    """An interpreter with that SGLang beside it."""
    packages = directory / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    python = directory / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    if version is not None:
        information = packages / f"sglang-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return python


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.5.20", "has SGLang 0.5.20, and SGLang"), (None, "has no SGLang, and SGLang"), (SGLANG_VERSION, None)],
)
def test_another_version_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str | None
) -> None:
    python = environment(tmp_path, version)
    monkeypatch.setenv(SGLANG_PYTHON, str(python))
    config = Config()
    assert missing_engine(config) is None
    config.rollout.engine = "sglang"
    problem = missing_engine(config)
    assert (problem is None) == (said is None)
    if problem is not None and said is not None:
        assert problem.startswith(
            f"rollout.engine=sglang: {python} {said} {SGLANG_VERSION} is needed; run `make sglang`"
        )
    assert sglang_version() == version
    assert check_sglang().ok == (version == SGLANG_VERSION)


def test_what_make_sglang_installs_is_what_is_needed() -> None:
    assert f" sglang=={SGLANG_VERSION} " in (ROOT / "scripts" / "setup_sglang.sh").read_text()
