"""Only few ranges of a wheel are downloaded: the ranges that contain its Python files."""

from __future__ import annotations

import io
from pathlib import Path
from zipfile import ZipFile

import setup_contracts
from contract_packages import Package

KERNEL_BYTES = 3 * setup_contracts.LARGEST_GAP


class Counted(io.BytesIO):
    """File that records the size of its largest read."""

    largest = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.largest = max(self.largest, len(data))
        return data


def wheel_of(names: list[str]) -> Counted:
    file = io.BytesIO()
    with ZipFile(file, "w") as wheel:
        for name in names:
            wheel.writestr(name, b"x" * KERNEL_BYTES if name.endswith(".so") else f"# {name}".encode())
    return Counted(file.getvalue())


def test_ranges_merge_neighbours_and_skip_large_gaps() -> None:
    names = ["lib/a.py", "lib/b.py", "lib/c.so", "lib/d.py", "lib/small.txt", "lib/e.py"]
    with ZipFile(wheel_of(names)) as wheel:
        ranges = list(setup_contracts.spans(wheel, [name for name in names if name.endswith(".py")]))
        offsets = {entry.filename: entry.header_offset for entry in wheel.infolist()}
        end = wheel.start_dir
    assert ranges == [(offsets["lib/a.py"], offsets["lib/c.so"]), (offsets["lib/d.py"], end)]


def test_only_python_of_the_module_is_unpacked_and_kernels_are_not_read(tmp_path: Path) -> None:
    file = wheel_of(["lib/kernels.so", "lib/a.py", "lib/deep/b.py", "other/c.py", "lib/data.txt", "lib/more.so"])
    with ZipFile(file) as wheel:
        setup_contracts._from_wheel(wheel, Package("lib", "1", "lib"), tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "lib/a.py",
        "lib/deep/b.py",
    }
    assert (tmp_path / "lib" / "deep" / "b.py").read_text() == "# lib/deep/b.py"
    assert file.largest < KERNEL_BYTES
