"""Seccomp filter: rejects system calls that programs do not need, as a BPF program.

Assembled by hand, without libseccomp: loads (LD), jumps (JEQ, JGE, JSET, each with offsets for true and false), and
verdicts (RET).
"""

from __future__ import annotations

import errno
import platform
import struct

from mcore_rl.errors import ConfigError

REFUSED = {
    # name: (x86-64, aarch64)
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    # Memory that belongs to no process, so that a sum over processes misses it.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
}
CLONE, CLONE3, SOCKET, SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
LAST_KNOWN = 462
"""mseal, Linux 6.10. The filter answers ENOSYS to newer system calls."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
STREAM, DATAGRAM = 1, 2
DEFAULT_PROTOCOL, TCP, UDP = 0, 6, 17
"""Other protocols of the internet families are refused: they load kernel modules that programs do not need."""
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID and NET, in the first argument of clone."""
_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
# Offsets in struct seccomp_data; for arguments the low 32 bits, little-endian.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
_TYPE_MASK = 0xF
"""Masks SOCK_CLOEXEC and SOCK_NONBLOCK."""
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_X32_BIT = 0x40000000
"""Set in the numbers of x32 system calls, which have the same architecture value as x86-64."""


_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables of system calls, and the kernel's AUDIT_ARCH value."""


def filter_program(*, sockets: bool, machine: str | None = None) -> bytes:
    """Return the filter as an array of struct sock_filter.

    sockets: allow socket() for unix sockets, TCP and UDP; only safe in a separate network namespace. socketpair() of
    unix sockets is always allowed, every other family never.

    Raises: ConfigError on another architecture than x86-64 and aarch64.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        known = " and ".join(_ARCHITECTURES)
        raise ConfigError(f"the sandbox knows the system calls of {known}, not of {machine}: set sandbox.url")
    column, audit = _ARCHITECTURES[machine]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in _program(column, audit, sockets=sockets))


Instruction = tuple[int, int, int, int]
"""Code, number of instructions to skip if true and if false, and constant."""


def _program(column: int, audit: int, *, sockets: bool) -> list[Instruction]:
    socket = SOCKET[column]
    return [
        # Other ABIs (32 bits on x86-64, x32) number calls differently, so the filter would check the wrong ones.
        (_LD, 0, 0, _ARCHITECTURE),
        (_JEQ, 1, 0, audit),
        (_RET, 0, 0, _KILL),
        (_LD, 0, 0, _NUMBER),
        (_JGE, 0, 1, _X32_BIT),
        (_RET, 0, 0, _KILL),
        *(rule for numbers in REFUSED.values() for rule in _refuse(numbers[column], errno.EPERM)),
        (_JGE, 0, 1, LAST_KNOWN + 1),
        (_RET, 0, 0, _ERRNO | errno.ENOSYS),
        *(_only_for(socket, _SOCKET_RULES) if sockets else _refuse(socket, errno.EPERM)),
        *_only_for(SOCKETPAIR[column], _PAIR_RULES),
        # A filter cannot read the flags of clone3, which are in memory; libc falls back to clone after ENOSYS.
        *_refuse(CLONE3[column], errno.ENOSYS),
        (_JEQ, 0, 3, CLONE[column]),
        (_LD, 0, 0, _FIRST_ARGUMENT),
        (_JSET, 0, 1, NEW_NAMESPACES),
        (_RET, 0, 0, _ERRNO | errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]


def _refuse(number: int, error: int) -> list[Instruction]:
    return _only_for(number, [(_RET, 0, 0, _ERRNO | error)])


def _only_for(number: int, rules: list[Instruction]) -> list[Instruction]:
    """Apply rules to one system call only. Every path through the rules must end in a verdict."""
    return [(_JEQ, 0, len(rules), number), *rules]


_PAIR_RULES = [
    (_LD, 0, 0, _FIRST_ARGUMENT),
    (_JEQ, 0, 1, AF_UNIX),
    (_RET, 0, 0, _ALLOW),
    (_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
]
# Jumps count from the next rule: 12 leads to the last one, which allows the call.
_SOCKET_RULES = [
    (_LD, 0, 0, _FIRST_ARGUMENT),
    (_JEQ, 12, 0, AF_UNIX),
    (_JEQ, 2, 0, AF_INET),
    (_JEQ, 1, 0, AF_INET6),
    (_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
    (_LD, 0, 0, _THIRD_ARGUMENT),
    (_JEQ, 2, 0, DEFAULT_PROTOCOL),
    (_JEQ, 1, 0, TCP),
    (_JEQ, 0, 4, UDP),
    (_LD, 0, 0, _SECOND_ARGUMENT),
    (_AND, 0, 0, _TYPE_MASK),
    (_JEQ, 2, 0, STREAM),
    (_JEQ, 1, 0, DATAGRAM),
    (_RET, 0, 0, _ERRNO | errno.EPROTONOSUPPORT),
    (_RET, 0, 0, _ALLOW),
]
