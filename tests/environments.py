"""Virtual environments that have only an interpreter's file and the metadata of packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def make_environment(root: Path, versions: Mapping[str, str]) -> Path:
    """Make an environment with these packages. Returns its interpreter."""
    packages = root / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    for name, version in versions.items():
        metadata = packages / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    return python
