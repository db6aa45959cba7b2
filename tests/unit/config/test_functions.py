"""Users' files are loaded once per process, under the same name in every process."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from mcore_rl.config.functions import absolute_spec, load_function
from mcore_rl.errors import ConfigError


def test_load_function_two_keys_share_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "count = []\nclass Wrong(Exception): pass\n"
        "def f():\n    count.append(1)\n    return len(count)\n"
        "def g():\n    raise Wrong('so')\n"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("def f():\n    return 'another'\n")
    monkeypatch.chdir(tmp_path)
    first, again = load_function("reward.function", "mine.py:f"), load_function("x", f"{tmp_path}/mine.py:f")
    assert [first(), again(), first()] == [1, 2, 3]
    assert load_function("x", "other/mine.py:f")() == "another"
    with pytest.raises(Exception, match="so") as caught:
        load_function("algorithm.filter", "mine.py:g")()
    assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)


def test_load_function_async_is_rejected_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "later.py"
    path.write_text("async def f(): ...\nclass G:\n    async def __call__(self): ...\ng = G()\n")
    for name in ("f", "g"):
        with pytest.raises(
            ConfigError, match=rf"^algorithm\.filter=.*later\.py:{name}: {name} must be .* not an async one"
        ):
            load_function("algorithm.filter", f"{path}:{name}")
        assert callable(load_function("reward.function", f"{path}:{name}", may_be_async=True))


def test_absolute_spec_file_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_spec("a/mine.py:f") == f"{os.getcwd()}/a/mine.py:f"
    assert [absolute_spec(spec) for spec in ("package.mine:f", "grpo", "/x/y.py:f")] == [
        *("package.mine:f", "grpo", "/x/y.py:f")
    ]


def test_load_file_name_with_dots_loads(tmp_path: Path) -> None:
    (tmp_path / "reward.v2.py").write_text("def f(**_): return 2.0\n")
    function = load_function("reward.function", f"{tmp_path}/reward.v2.py:f")
    assert function() == 2.0
    assert pickle.loads(pickle.dumps(function)) is function


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
