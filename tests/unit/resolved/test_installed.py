"""An installed but unusable TransformerEngine is reported during detection, with the error of its import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import look

ERRORS = {
    "a library is missing": "raise OSError('libcudnn.so.9: cannot open shared object file\\nmore')",
    "built for another torch": "raise ImportError('undefined symbol: _ZN3c104cuda')",
    "no extension": "import transformer_engine_torch",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package of this name and version; the test writes its `pytorch.py`."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    # Like the real package, it ignores errors of its parts.
    (package / "__init__.py").write_text("try:\n    from . import pytorch\nexcept Exception:\n    pass\n")
    metadata = tmp_path / "transformer_engine-2.11.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.11.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("CUDNN_HOME", "CUDNN_PATH"):  # restored after the test
        monkeypatch.setenv(name, "")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.parametrize("problem", ERRORS)
def test_transformer_engine_failing_import_is_rejected(installed: Path, problem: str) -> None:
    (installed / "pytorch.py").write_text(ERRORS[problem])
    with pytest.raises(
        ConfigError, match=r"transformer-engine 2\.11\.0 is installed, but .* cannot be imported"
    ) as info:
        look(cuda=True)
    assert any(word in str(info.value) for word in ("libcudnn.so.9", "undefined symbol", "transformer_engine_torch"))
    assert "\n" not in str(info.value)
    assert "make setup EXTRA=gpu" in str(info.value)
    assert look(cuda=False).transformer_engine == "2.11.0"  # a CPU builds nothing from it


def test_transformer_engine_importable_version_is_returned(installed: Path) -> None:
    (installed / "pytorch.py").write_text("")
    assert look(cuda=True).transformer_engine == "2.11.0"


def test_transformer_engine_loads_the_cudnn_package(installed: Path) -> None:
    library = installed.parent / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    library.parent.mkdir(parents=True)
    library.touch()
    (installed / "pytorch.py").write_text("import os\nHOME = os.environ['CUDNN_HOME']\n")
    look(cuda=True)
    assert str(library.parents[1]) == sys.modules["transformer_engine.pytorch"].HOME


@pytest.mark.parametrize("name", ["CUDNN_HOME", "CUDNN_PATH"])
def test_transformer_engine_keeps_the_users_cudnn(installed: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (installed.parent / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    (installed.parent / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9").touch()
    monkeypatch.setenv(name, "/mine")
    (installed / "pytorch.py").write_text("import os\nFOUND = os.environ.get('CUDNN_HOME', '')\n")
    look(cuda=True)
    assert sys.modules["transformer_engine.pytorch"].FOUND in ("", "/mine")
