"""Numbers and jumps of the seccomp filter, compared with the kernel's headers by an interpreter of BPF; control
groups."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.sandbox.confinement import memory
from mcore_rl.sandbox.confinement.memory import ControlGroup
from mcore_rl.sandbox.confinement.seccomp import CLONE, CLONE3, LAST_KNOWN, REFUSED, SOCKET, SOCKETPAIR, filter_program

HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
NO_FAMILY, NO_PROTOCOL = 0x50061, 0x5005D


def verdict(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    """Return the filter's verdict, by interpreting it according to the documentation of classic BPF."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *[*arguments, *[0] * 6][:6])
    steps, place, loaded = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, k = steps[place]
        place += 1
        if code == 0x06:
            return k
        if code == 0x20:
            loaded = struct.unpack_from("=I", data, k)[0]
        elif code == 0x54:
            loaded &= k
        else:
            holds = {0x15: loaded == k, 0x35: loaded >= k, 0x45: bool(loaded & k)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize(("column", "header"), list(enumerate(HEADERS)))
def test_system_call_numbers_match_kernel_headers(column: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed (linux-libc-dev)")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    table = {**REFUSED, "clone": CLONE, "clone3": CLONE3, "socket": SOCKET, "socketpair": SOCKETPAIR}
    known = {name: numbers[name] for name in table if name in numbers}
    assert len(known) > 45
    assert {name: str(table[name][column]) for name in known} == known


@pytest.mark.parametrize("machine", AUDIT)
def test_filter_verdict_per_system_call(machine: str) -> None:
    column, program = list(AUDIT).index(machine), filter_program(sockets=True, machine=machine)
    refused = {numbers[column] for numbers in REFUSED.values()} | {CLONE3[column]}
    for number in set(range(600)) - {SOCKET[column], SOCKETPAIR[column]}:
        missing = number == CLONE3[column] or number > LAST_KNOWN
        expected = ENOSYS if missing else EPERM if number in refused else ALLOW
        assert verdict(program, number, AUDIT[machine]) == expected, number
    assert verdict(program, CLONE[column], AUDIT[machine], 0x11) == ALLOW
    assert verdict(program, CLONE[column], AUDIT[machine], 0x10000011) == EPERM
    assert verdict(program, 0x40000001, AUDIT[machine]) == KILL
    assert verdict(program, 1, 0x40000003) == KILL
    assert verdict(filter_program(sockets=False, machine=machine), SOCKET[column], AUDIT[machine]) == EPERM


@pytest.mark.parametrize("machine", AUDIT)
def test_filter_verdict_per_socket_family(machine: str) -> None:
    column, program = list(AUDIT).index(machine), filter_program(sockets=True, machine=machine)

    def errno_of(number: tuple[int, int], *arguments: int) -> int:
        return verdict(program, number[column], AUDIT[machine], *arguments)

    for family in range(64):
        known = family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
        assert errno_of(SOCKET, family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) == (ALLOW if known else NO_FAMILY)
        assert errno_of(SOCKETPAIR, family, 1) == (ALLOW if family == socket.AF_UNIX else NO_FAMILY)
        assert errno_of(SOCKET, family | 1 << 32, 1) == errno_of(SOCKET, family, 1)  # the kernel reads 32 bits
    for kind in range(16):
        for protocol in range(300):
            allowed = kind in (1, 2) and protocol in (0, 6, 17)
            assert errno_of(SOCKET, socket.AF_INET, kind | 0x800, protocol) == (ALLOW if allowed else NO_PROTOCOL)
    assert errno_of(SOCKET, socket.AF_UNIX, socket.SOCK_SEQPACKET) == ALLOW


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"not of riscv64: set sandbox\.url"):
        filter_program(sockets=True, machine="riscv64")


@pytest.fixture
def parent() -> Path:
    parent = memory._parent_group()
    if parent is None:
        pytest.skip("no control groups can be made here")
    return parent


def test_busy_group_is_removed_with_the_next_group(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_REMOVAL_SECONDS", 0.05)
    group = ControlGroup(parent, 1 << 30)
    (group._path / "held").mkdir()  # like processes that are still dying
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started >= 0.05
    assert group._path.exists()
    (group._path / "held").rmdir()
    following = ControlGroup(parent, 1 << 30)
    assert not group._path.exists()
    following.close()
    assert not following._path.exists()
    assert not memory._busy_groups


def test_groups_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_candidates", lambda: [tmp_path])
    dead, living, foreign = (tmp_path / f"{memory.PREFIX}{name}" for name in ("4194305_0", f"{os.getpid()}_0", "x"))
    with memory.groups_removed():
        for group in (dead, living, foreign):
            group.mkdir()
    assert [group.exists() for group in (dead, living, foreign)] == [False, True, True]
