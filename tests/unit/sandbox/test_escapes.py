"""Attacks by a model's code in bubblewrap: every attempt is contained and leaves nothing behind (conftest)."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.sandbox.confinement import memory
from mcore_rl.sandbox.interface import Outcome, Program
from mcore_rl.sandbox.local import LocalSandbox
from tests.unit.sandbox.conftest import limited

TRY = """
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        return ["DONE", action()]
    except OSError as error:
        return ["refused", error.strerror]
def call(number, *arguments):
    def action():
        result = libc.syscall(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result
    return attempt(action)
def write_to(path, flags=0):
    return attempt(lambda: os.close(os.open(path, os.O_WRONLY | flags)))
"""


def run(sandbox: LocalSandbox, code: str, **changes: object) -> Outcome:
    return sandbox.run(Program(code, **changes))


def answers(sandbox: LocalSandbox, expression: str) -> Any:
    outcome = run(sandbox, f"{TRY}\nprint(json.dumps({expression}))")
    assert outcome.ok, outcome
    return json.loads(outcome.stdout)


def all_refused(sandbox: LocalSandbox, attempts: dict[str, str]) -> dict[str, list[Any]]:
    """Evaluate expressions inside and assert that each was refused; returns their results by name."""
    results = answers(sandbox, "{" + ", ".join(f"{name!r}: {code}" for name, code in attempts.items()) + "}")
    assert {name: result for name, result in results.items() if result[0] != "refused"} == {}
    return results


def test_files_outside_tmp_are_not_writable(sandbox: LocalSandbox) -> None:
    program = os.path.realpath("/usr/bin/python3")
    kernel = ("kernel/core_pattern", "vm/drop_caches", "vm/swappiness")
    existing = [program, "/proc/sysrq-trigger", *(f"/proc/sys/{name}" for name in kernel)]
    created = ("/usr/x", "/x", "/dev/x", "/etc/x", "/usr/bin/x", "/proc/x", "/bin/x", "/etc/alternatives/x")
    attempts = {path: f"write_to({path!r})" for path in existing}
    attempts |= {path: f"write_to({path!r}, os.O_CREAT)" for path in created}
    all_refused(sandbox, attempts | {"chmod": f"attempt(lambda: os.chmod({program!r}, 0o777))"})


def test_host_directories_are_invisible(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    tmp_path.chmod(0o755)
    paths = [*"/root /home /sys /etc/passwd /etc/shadow /var /run".split(), str(tmp_path / "secret"), os.getcwd()]
    results = answers(sandbox, f"{{path: os.path.exists(path) for path in {paths!r}}}")
    assert not any(results.values()), results
    assert answers(sandbox, "sorted(os.listdir('/etc'))") == [
        name for name in ("alternatives", "ld.so.cache") if Path("/etc", name).exists()
    ]


def test_environment_of_launcher_is_invisible(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_SECRET", "s3cret")
    outcome = run(sandbox, "import glob\nfor p in glob.glob('/proc/[0-9]*/environ'): print(p, open(p, 'rb').read())")
    assert "/proc/1/environ" in outcome.stdout
    assert "s3cret" not in outcome.stdout
    assert set(answers(sandbox, "dict(os.environ)")) <= {
        *("PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "PWD", "SHLVL", "_", "LC_CTYPE", "OLDPWD")
    }


def test_code_is_not_root_and_has_no_capabilities(sandbox: LocalSandbox) -> None:
    outcome = run(sandbox, "import os\nprint(os.getuid(), os.getgroups())\nprint(open('/proc/self/status').read())")
    status = dict(line.split(":\t", 1) for line in outcome.stdout.splitlines()[1:] if ":\t" in line)
    assert outcome.stdout.startswith("1000 ")
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user the host's root is no concern")
def test_user_outside_is_not_root(sandbox: LocalSandbox) -> None:
    uid_map = answers(sandbox, "open('/proc/self/uid_map').read().split()")
    with sandbox.interpreter() as interpreter:
        assert Path(f"/proc/{interpreter._confined.process.pid}").stat().st_uid != 0
    assert uid_map[2] == "1"


def test_user_namespaces_are_refused_without_filter(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    monkeypatch.setattr("mcore_rl.sandbox.confinement.commands.filter_program", lambda sockets: everything)
    results = answers(
        LocalSandbox(limited()),
        "{'filter': attempt(lambda: os.memfd_create('x')), 'unshare': attempt(lambda: libc.unshare(0x10000000) and "
        "(_ for _ in ()).throw(OSError(0, os.strerror(ctypes.get_errno()))))}",
    )
    assert results["filter"][0] == "DONE"
    assert results["unshare"] == ["refused", os.strerror(errno.ENOSPC)]


FORK_BOMB = (
    "import os, time\nn = 0\ntry:\n  while n < 400:\n    if os.fork() == 0: time.sleep(60); os._exit(0)\n    n += 1\n"
    "except OSError as error: print(n, error.strerror, flush=True)\nelse: print('NOT LIMITED')\ntime.sleep(1)"
)


def test_fork_bombs_stop_at_the_limit_of_their_sandbox() -> None:
    sandbox, barrier = LocalSandbox(limited(max_running=8)), threading.Barrier(8)

    def start(_: int) -> list[str]:
        barrier.wait()
        return run(sandbox, FORK_BOMB).stdout.split(" ", 1)

    with ThreadPoolExecutor(8) as pool:
        counts, words = zip(*pool.map(start, range(8)), strict=True)
    assert len(set(counts)) == 1
    assert 8 < int(counts[0]) < 16
    assert all("unavailable" in each for each in words)


def test_every_writable_directory_has_a_size_limit(sandbox: LocalSandbox) -> None:
    code = (
        "def fill(place):\n  n = 0\n  try:\n    for i in range(50):\n      with open(f'{place}/f{i}', 'wb', 0) as f:\n"
        "        for _ in range(7): n += f.write(bytes(1 << 20))\n  except OSError: pass\n  return n >> 20\n"
        "print([fill(place) for place in ('/tmp', '/dev/shm', '/dev', '/', '/proc', '/etc')])"
    )
    tmp, shm, *others = json.loads(run(sandbox, code).stdout)
    assert 20 <= tmp <= 24
    assert shm <= 1
    assert others == [0] * 4


def test_large_file_stops_at_file_limit(sandbox: LocalSandbox) -> None:
    code = (
        "n = 0\nf = open('/tmp/f', 'wb', 0)\ntry:\n  while True: n += f.write(bytes(1 << 20))\n"
        "except OSError as e: print(n >> 20, e.strerror)"
    )
    assert run(sandbox, code).stdout == "8 File too large\n"


def test_many_empty_files_end_only_this_run(sandbox: LocalSandbox) -> None:
    code = "n = 0\ntry:\n  for n in range(200000): open('/tmp/%d' % n, 'w').close()\nexcept OSError: pass\nprint(n)"
    outcome = run(LocalSandbox(limited(memory_mib=32)), code, seconds=8.0)
    # Only control groups count the kernel's memory of the files.
    assert outcome.why == "memory" or (memory._parent_group() is None and outcome.why in ("exit", "timeout"))


def test_process_over_memory_limit_gets_memory_error(sandbox: LocalSandbox) -> None:
    outcome = run(sandbox, "try: x = bytearray(300 << 20)\nexcept MemoryError: print('MemoryError')")
    assert (outcome.why, outcome.stdout) == ("exit", "MemoryError\n")


MANY = (
    "import os, time\nfor i in range(6):\n  if os.fork() == 0:\n    x = bytearray(b'1') * (120 << 20)\n"
    "    time.sleep(30)\n"
    "    os._exit(0)\ntime.sleep(30)"
)


def test_processes_over_total_memory_end_the_run(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without control groups, a watcher ends the run."""
    outcomes = [run(sandbox, MANY)]
    monkeypatch.setattr(memory, "_parent_group", lambda: None)
    outcomes.append(run(sandbox, MANY))
    assert [(outcome.why, outcome.return_code) for outcome in outcomes] == [("memory", 137)] * 2


def test_dangerous_system_calls_are_refused(sandbox: LocalSandbox) -> None:
    calls = {
        "memfd": "attempt(lambda: os.memfd_create('x'))",
        "shmget": "call(29, 0, 1 << 30, 0o1600)",
        "mq_open": "call(240, b'q', 0o102, 0o600, None)",
        "msgget": "call(68, 0, 0o1600)",
        "add_key": "call(248, b'user', b'k', b'v', 1, -3)",
        "io_uring_setup": "call(425, 4, ctypes.create_string_buffer(200))",
        "bpf": "call(321, 0, 0, 0)",
        "userfaultfd": "call(323, 1)",
        "perf": "call(298, ctypes.create_string_buffer(200), 0, -1, -1, 0)",
        "mount": "call(165, 0, b'/tmp', b'tmpfs', 0, 0)",
        "ptrace pid 1": "call(101, 16, 1, 0, 0)",
        "ptrace own child": "call(101, 0, 0, 0, 0)",
        "read another's memory": "call(310, 1, 0, 0, 0, 0, 0)",
        "unshare user": "call(272, 0x10000000)",
        "unshare mount": "call(272, 0x20000)",
        "clone user": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
        "setns": "call(308, 0, 0)",
        "clone3": "call(435, ctypes.create_string_buffer(88), 88)",
    }
    if os.uname().machine != "x86_64":
        pytest.skip("numbers are those of x86-64; test_confinement.py has the other table")
    results = all_refused(sandbox, calls)
    assert {name: words for name, (_, words) in results.items() if words != "Operation not permitted"} == {
        "clone3": "Function not implemented"
    }


def test_signals_to_outside_are_refused(sandbox: LocalSandbox) -> None:
    code = (
        f"import os\nfor pid in {sorted({os.getpid(), os.getppid()} - {1})}:\n  try: os.kill(pid, 0); print('SEEN')\n"
        "  except OSError as e: print(e.strerror)\n"
        "try: os.kill(-1, 9)\nexcept OSError: pass\nprint(sorted(p for p in os.listdir('/proc') if p.isdigit())[:1])"
    )
    outcome = run(sandbox, code)
    assert outcome.stdout.startswith("No such process\n")
    assert "SEEN" not in outcome.stdout
    assert run(sandbox, "import os\nos.kill(os.getppid(), 19)\nprint('alive')").stdout == "alive\n"


def test_network_is_unreachable(sandbox: LocalSandbox) -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        abstract.bind(f"\0mcore_rl_sandbox_{os.getpid()}")
        abstract.listen()
        calls = {
            "tcp": f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)",
            "outside": "socket.create_connection(('192.0.2.1', 53), 2)",
            "udp": "socket.socket(2, 2).sendto(b'x', ('192.0.2.1', 53))",
            "raw": "socket.socket(2, 3, 1)",
            "packet": "socket.socket(17, 3)",
            "abstract": f"socket.socket(1).connect('\\0mcore_rl_sandbox_{os.getpid()}')",
        }
        all_refused(sandbox, {name: f"attempt(lambda: {call})" for name, call in calls.items()})


def test_other_socket_families_are_refused(sandbox: LocalSandbox) -> None:
    families = {name: int(getattr(socket, name)) for name in dir(socket) if name.startswith("AF_")}
    needed = ("AF_UNIX", "AF_INET", "AF_INET6")
    calls = {
        f"{name} {kind} {function}": f"attempt(lambda: socket.{function}({number}, {kind}) and None)"
        for name, number in families.items()
        for kind in (1, 2, 3, 5)
        for function in ("socket", "socketpair")
        if name not in needed
    }
    calls |= {f"protocol {n}": f"attempt(lambda: socket.socket(2, 1, {n}) and None)" for n in (1, 33, 132, 136, 262)}
    calls |= {
        "pair of TCP": "attempt(lambda: socket.socketpair(2, 1) and None)",
        "unknown call": "call(467, 0, 0, 0, 0)",
    }
    all_refused(sandbox, calls)


def test_sockets_inside_the_sandbox_work(sandbox: LocalSandbox) -> None:
    code = (
        "import asyncio, socket\na, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))\n"
        "for family, address in ((2, ('127.0.0.1', 0)), (1, '/tmp/s')):\n"
        "  s, c = socket.socket(family), socket.socket(family)\n"
        "  s.bind(address); s.listen(); c.connect(s.getsockname())\n"
        "  c.send(b'y'); print(s.accept()[0].recv(1))\n"
        "u = socket.socket(2, 2); u.bind(('127.0.0.1', 0)); u.sendto(b'z', u.getsockname()); print(u.recv(1))\n"
        "print(asyncio.run(asyncio.sleep(0, 'loop')))"
    )
    assert run(sandbox, code).stdout.split() == ["b'x'", "b'y'", "b'y'", "b'z'", "loop"]


def test_setuid_programs_have_no_effect(sandbox: LocalSandbox) -> None:
    code = (
        "import subprocess\n"
        "done = subprocess.run(['su', '-c', 'id -u'], capture_output=True, text=True, stdin=subprocess.DEVNULL)\n"
        "print(done.returncode != 0, repr(done.stdout))"
    )
    assert run(sandbox, code).stdout == "True ''\n"


def test_endless_output_is_truncated_at_the_limit(sandbox: LocalSandbox) -> None:
    for stream in (1, 2):
        outcome = run(sandbox, f"import os\nwhile True: os.write({stream}, b'x' * 65536)")
        assert (outcome.why, outcome.return_code) == ("output", 137)
        assert len(outcome.stdout) + len(outcome.stderr) == 64 << 10


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(1e6)",
        "import signal, time\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, 1)\ntime.sleep(1e6)",
        "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(1e6)",
        "import os\nwhile True:\n  os.read(0, 1)",
    ],
    ids=["sleep", "every signal ignored", "output closed", "busy"],
)
def test_endless_program_is_killed(sandbox: LocalSandbox, code: str) -> None:
    outcome = run(sandbox, code, seconds=0.7)
    assert (outcome.why, outcome.return_code) == ("timeout", 137)


def test_cpu_limit_kills_program_that_ignores_sigxcpu() -> None:
    sandbox = LocalSandbox(limited(cpu_seconds=1))
    outcome = run(sandbox, "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass")
    assert (outcome.why, outcome.return_code) == ("exit", 137)


@pytest.mark.parametrize("keeps_pipes", [False, True])
def test_daemon_does_not_outlive_the_run(sandbox: LocalSandbox, keeps_pipes: bool) -> None:
    closing = "" if keeps_pipes else "    for i in range(3): os.close(i)\n"
    code = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        f"{closing}    time.sleep(777)\n  os._exit(0)\nprint('left')"
    )
    outcome = run(sandbox, code)
    assert (outcome.why, outcome.stdout) == ("exit", "left\n")


def test_fetch_ignores_links(sandbox: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    code = (
        f"import os\nos.symlink({str(secret)!r}, 'answer'); os.symlink('/etc/shadow', 'shadow'); os.mkfifo('pipe')\n"
        "open('real', 'w').write('yes')"
    )
    outcome = run(sandbox, code, fetch=("answer", "shadow", "pipe", "real", "missing"))
    assert outcome.files == {"real": b"yes"}


def test_runs_do_not_share_files(sandbox: LocalSandbox) -> None:
    run(sandbox, "open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')")
    assert answers(sandbox, "[os.listdir('/tmp'), os.listdir('/dev/shm')]") == [["main.py"], []]


def test_host_descriptors_are_not_inherited(sandbox: LocalSandbox, tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        # The last descriptor belongs to the listing. From the host there are only the three pipes and bubblewrap's
        # own.
        targets = answers(
            sandbox, "[attempt(lambda: os.readlink(f'/proc/self/fd/{n}'))[1] for n in os.listdir('/proc/self/fd')]"
        )
    assert not any("secret" in target for target in targets), targets
    assert sum(target.startswith("pipe:") for target in targets) == 3
