"""Download the Python files of CUDA packages, without their kernels, for tests/contract/cuda and tests/te.

`.venv/bin/python scripts/setup_contracts.py` writes each package to a folder of .peers/contracts; existing folders
stay.

pip finds the wheels, with its own settings. Only the byte ranges with Python files are downloaded, or the whole wheel
if the index does not support ranges.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from zipfile import ZipFile

from contract_packages import FOLDER, PACKAGES, Package
from pip._internal.commands import create_command
from pip._internal.models.link import Link
from pip._internal.models.target_python import TargetPython
from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP
from pip._internal.network.session import PipSession
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.requests import Response

LARGEST_GAP = 1 << 18
"""Maximum bytes between two Python files that are downloaded in one request."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64", "linux_x86_64"]
"""Platform tags of GPU machines, independent of this machine."""


def fetch(package: Package) -> None:
    """Create the folder of a package atomically."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as store:
        whole = Path(store) / "whole"
        with ExitStack() as stack:
            session, link = _found_by_pip(package, stack)
            if link.is_wheel:
                _from_wheel(stack.enter_context(ZipFile(_opened(session, link, stack))), package, whole)
            else:
                _from_sources(session.get(link.url_without_fragment), package, whole)
        if not (whole / package.module).is_dir():
            raise FileNotFoundError(f"{link.filename} has no Python under {package.module}/")
        whole.rename(package.folder)  # an interrupted download leaves no folder


def _from_wheel(wheel: ZipFile, package: Package, target: Path) -> None:
    python = re.compile(
        rf"{package.module}/.*\.py|[^/]+\.dist-info/.*"
    )  # with metadata: packages read their own version
    names = [name for name in wheel.namelist() if python.fullmatch(name)]
    assert wheel.fp is not None
    # Read ahead: LazyZipOverHTTP keeps downloaded ranges, so that extractall needs no further requests.
    for start, stop in spans(wheel, names):
        wheel.fp.seek(start)
        wheel.fp.read(stop - start)
    wheel.extractall(target, names)


def _from_sources(response: Response, package: Package, target: Path) -> None:
    response.raise_for_status()
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        for member in archive.getmembers():
            # Strip the top-level folder, NAME-VERSION, that every source archive has.
            path = Path(*Path(member.name).parts[1:])
            wanted = path.suffix == ".py" and path.parts[0] == package.module and ".." not in path.parts
            file = archive.extractfile(member) if wanted else None
            if file is not None:
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).write_bytes(file.read())


def spans(wheel: ZipFile, names: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of files in an archive; adjacent files share a range."""
    wanted = set(names)
    entries = sorted(wheel.infolist(), key=lambda entry: entry.header_offset)
    # An entry ends where the next one starts; the last one, where the archive's directory starts.
    ends = [entry.header_offset for entry in entries[1:]] + [wheel.start_dir]
    begin = end = 0
    for entry, next_begin in zip(entries, ends, strict=True):
        if entry.filename not in wanted:
            continue
        if entry.header_offset - end > LARGEST_GAP:
            if end > begin:
                yield begin, end
            begin = entry.header_offset
        end = next_begin
    if end > begin:
        yield begin, end


def _found_by_pip(package: Package, stack: ExitStack) -> tuple[PipSession, Link]:
    command = create_command("download")
    options, _ = command.parse_args(["--disable-pip-version-check", "--retries=1", package.distribution])
    stack.enter_context(command.main_context())
    session = command.get_default_session(options)  # type: ignore[attr-defined]
    # For GPU machines, whatever this machine is.
    finder = command._build_package_finder(  # type: ignore[attr-defined]
        options, session, TargetPython(platforms=PLATFORMS, py_version_info=(3, 12))
    )
    best = finder.find_best_candidate(package.distribution, SpecifierSet(f"=={package.version}")).best_candidate
    if best is None:
        raise FileNotFoundError(f"the index does not have {package.distribution} {package.version}")
    return session, best.link


def _opened(session: PipSession, link: Link, stack: ExitStack) -> IO[bytes]:
    """Open a wheel as a file, reading remote ranges if the index supports them."""
    try:
        return stack.enter_context(LazyZipOverHTTP(link.url_without_fragment, session))  # type: ignore[arg-type]
    except HTTPRangeRequestUnsupported:
        print(f"the index does not support ranges: downloading all of {link.filename}", flush=True)
    response = session.get(link.url_without_fragment)
    response.raise_for_status()
    return io.BytesIO(response.content)


def main() -> int:
    """Download all packages. Returns 1 after printing a line for each package that could not be downloaded, else 0."""
    logging.getLogger("pip").setLevel(logging.ERROR)
    missing = []
    for package in PACKAGES:
        if package.folder.is_dir():
            continue
        try:
            fetch(package)
            print(f"fetched the Python of {package.distribution} {package.version}", flush=True)
        except Exception as error:  # pip raises many types, which all mean that the package is missing
            missing.append(f"{package.distribution} {package.version}: {type(error).__name__}: {error}")
    for line in missing:
        print(line, file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
