"""Users' files as modules: files in the same folder, and packages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from mcore_rl.config.functions import load_function
from mcore_rl.errors import ConfigError


def test_load_file_imports_files_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_plain.py").write_text("def g(): return 2.0\n")
    (tmp_path / "mine.py").write_text("import beside_plain\ndef f(**_): return beside_plain.g()\n")
    assert load_function("reward.function", f"{tmp_path}/mine.py:f")() == 2.0


@pytest.mark.parametrize("init", [(), ("mine_package",), ("mine_package", "mine_package/inner")])
def test_load_file_relative_imports_load_the_package(
    tmp_path: Path, init: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    top = f"top_{len(init)}"
    folder = tmp_path / top / "mine_package" / "inner"
    folder.mkdir(parents=True)
    for name in init:
        (tmp_path / top / name / "__init__.py").write_text("")
    inner = folder if len(init) > 1 else folder.parent
    package = inner.rename(inner.with_name(f"{inner.name}_{len(init)}"))
    (package / "beside.py").write_text("VALUE = 3.0\n")
    (package / "mine.py").write_text("from .beside import VALUE\ndef f(**_): return VALUE\n")
    function = load_function("reward.function", f"{package}/mine.py:f")
    assert function() == 3.0
    assert pickle.loads(pickle.dumps(function)) is function


def test_load_file_taken_package_name_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text("from . import x\ndef f(**_): return 1.0\n")
    with pytest.raises(ConfigError, match=r"would be the module json\.decoder, but that name belongs to .*rename"):
        load_function("reward.function", f"{tmp_path}/json/decoder.py:f")
