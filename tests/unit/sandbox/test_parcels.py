"""Files that code inside may have forged, as root and as another user of the host."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError, SandboxError
from mcore_rl.sandbox.interface import Program
from mcore_rl.sandbox.local import LocalSandbox
from mcore_rl.sandbox.parcels import unpack

FORGERIES = {
    "negative length": b"-512\nabc",
    "length of gigabytes": b"3000000000\nabc",
    "length beyond the end": b"4\nabc",
    "endless length": b"9" * 100_000,
    "fraction": b"1.5\nabc",
    "digits of another script": "٣\nabc".encode(),
    "no length": b"\nabc",
    "more than one file": b"1\na1\nb",
    "something behind": b"1\nab",
    "zeros": bytes(100_000),
}
FORGE = """
import glob, os
data = {data!r}
for path in glob.glob('/proc/[0-9]*/fd/*'):
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, data)
    except OSError: pass
for fd in range(3, 60):
    try: os.write(fd, data)
    except OSError: pass
open('x', 'w').write('real')
"""
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
MAX_RESULT_BYTES = 1 << 20


def forged_archive(size: int) -> bytes:
    """A tar archive with one entry of a forged size."""
    entry = tarfile.TarInfo("x")
    entry.size = size
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(entry, None)
    return packed.getvalue()


def sparse_archive(size: int) -> bytes:
    """A tar archive whose entry expands to `size` zeros (old GNU format)."""
    header = bytearray(forged_archive(0)[:512])
    header[156:157] = b"S"
    header[386:410] = b"00000000000\0" * 2
    header[483:495] = b"%011o\0" % size
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    return bytes(header) + bytes(1024)


ARCHIVES = (forged_archive(-512), forged_archive(3 << 30), sparse_archive(3 << 30))


@pytest.mark.parametrize("packed", [*FORGERIES.values(), *ARCHIVES])
def test_unpack_of_a_forged_parcel_raises_an_error(packed: bytes) -> None:
    with pytest.raises(SandboxError, match="cannot be fetched"):
        unpack(packed, ("x",))


def test_unpack_returns_wanted_files_in_order() -> None:
    assert unpack(b"3\na\nb-\n0\n2\n\xff\n", ("a", "missing", "empty", "b")) == {
        "a": b"a\nb",
        "empty": b"",
        "b": b"\xff\n",
    }


def fetched(data: bytes) -> int:
    """Return the number of bytes that a program can forge by writing `data` to every pipe that it can open; -1 for an
    error."""
    outcome_of = LocalSandbox(SandboxConfig(seconds=10.0))
    try:
        outcome = outcome_of.run(Program(FORGE.format(data=data), fetch=("x",)))
    except SandboxError:
        return -1
    return sum(map(len, outcome.files.values()))


FORGED = (*ARCHIVES, b"3000000000\n", b"-512\n", b"4\nreal4\nreal")


@pytest.mark.parametrize("data", FORGED)
def test_forged_parcel_as_this_user_stays_small(sandbox: LocalSandbox, data: bytes) -> None:
    assert fetched(data) <= MAX_RESULT_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is the one of the tests")
def test_forged_parcel_as_another_user_stays_small() -> None:
    root = str(Path(__file__).parents[3])
    code = (
        "from mcore_rl.sandbox.check import check_local\nfrom tests.unit.sandbox import test_parcels as t\n"
        "check_local(t.SandboxConfig())\nprint([t.fetched(data) for data in t.FORGED])"
    )
    environment = {**os.environ, "PYTHONPATH": root, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*AS_NOBODY, sys.executable, "-c", code],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ConfigError.__name__ in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.strip("[]\n").split(", "))) <= MAX_RESULT_BYTES
