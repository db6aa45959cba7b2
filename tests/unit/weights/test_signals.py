"""Signals between the users of a staging buffer, each with a file and a mapping of its own as in a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports import signals as signals_module
from mcore_rl.weights.transports.signals import Signals

WRITER, READER = 0, 1
NUM_SLOTS = 40
"""So many that their counts take more memory than the semaphores of two users."""
CHILD = """
import sys
from mcore_rl.weights.transports.signals import Signals
signals = Signals.attach(sys.argv[1], 2, 2)
signals.join(0)
signals.post(0, 1)
print("joined", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pair() -> Iterator[tuple[Signals, Signals]]:
    """Signals as the writer and as the reader see them."""
    writer = Signals.create(2, NUM_SLOTS)
    reader = Signals.attach(writer.name, 2, NUM_SLOTS)
    writer.join(WRITER)
    reader.join(READER)
    yield writer, reader
    writer.unlink()
    reader.close()
    writer.close()


def wait(signals: Signals, source: int, target: int, seconds: float = 20) -> None:
    signals.wait(source, target, timeout_seconds=seconds, name=f"user {source}")


def test_signals_are_counted_per_direction(pair: tuple[Signals, Signals]) -> None:
    writer, reader = pair
    writer.post(WRITER, READER)
    writer.post(WRITER, READER)
    reader.post(READER, WRITER)
    wait(reader, WRITER, READER)
    wait(reader, WRITER, READER)
    wait(writer, READER, WRITER)
    for signals, source, target in ((reader, WRITER, READER), (writer, READER, WRITER)):
        with pytest.raises(PeerLostError, match=rf"user {source}: no answer within 0\.3 s"):
            wait(signals, source, target, 0.3)


def test_signal_reaches_only_its_target() -> None:
    signals = Signals.create(4, num_slots=1)
    pairs = [(source, target) for source in range(4) for target in range(4)]
    for posted in pairs:
        signals.post(*posted)
        for other in pairs:
            if other != posted:
                with pytest.raises(PeerLostError):
                    wait(signals, *other, 0)
        wait(signals, *posted)
    signals.unlink()
    signals.close()


def test_signal_ends_a_wait_that_has_begun(pair: tuple[Signals, Signals], monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal wakes the reader, which does not wait for its next check."""
    writer, reader = pair
    monkeypatch.setattr(signals_module, "SECONDS_BETWEEN_CHECKS", 60.0)
    threading.Timer(0.3, writer.post, (WRITER, READER)).start()
    wait(reader, WRITER, READER, 5)


def test_signal_just_before_the_other_user_left_is_taken(
    pair: tuple[Signals, Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = pair

    def leave(signals: Signals, user: int) -> bool:
        writer.post(WRITER, READER)
        return False

    monkeypatch.setattr(Signals, "_is_present", leave)
    wait(reader, WRITER, READER)


def test_bytes_written_are_kept_per_user_and_slot(pair: tuple[Signals, Signals]) -> None:
    writer, reader = pair
    for user in (WRITER, READER):
        for slot in range(NUM_SLOTS):
            writer.set_bytes_written(user, slot, (1 << 40) + 100 * user + slot)
    for source, target in ((WRITER, READER), (READER, WRITER)):
        with pytest.raises(PeerLostError):  # the counts are beside the semaphores
            wait(reader, source, target, 0)
        writer.post(source, target)
    found = [[reader.bytes_written(user, slot) - (1 << 40) for slot in range(NUM_SLOTS)] for user in (WRITER, READER)]
    assert found == [[*range(NUM_SLOTS)], [*range(100, 100 + NUM_SLOTS)]]


def test_wait_fails_after_the_other_user_left_but_takes_its_last_signal(pair: tuple[Signals, Signals]) -> None:
    writer, reader = pair
    writer.post(WRITER, READER)
    writer.leave()
    writer.leave()
    wait(reader, WRITER, READER)
    with pytest.raises(PeerLostError, match="user 0: it has closed its staging buffer, or ended"):
        wait(reader, WRITER, READER)


def test_user_stays_when_its_process_closes_another_mapping(pair: tuple[Signals, Signals]) -> None:
    """The other locks of fcntl end when the process closes any descriptor of the file."""
    writer, reader = pair
    Signals.attach(writer.name, 2, NUM_SLOTS).close()
    with pytest.raises(PeerLostError, match="no answer"):
        wait(reader, WRITER, READER, 0.3)


def test_wait_fails_after_this_process_left(pair: tuple[Signals, Signals]) -> None:
    """Another thread that still waits must not block until the timeout."""
    _, reader = pair
    reader.leave()
    with pytest.raises(PeerLostError):
        wait(reader, WRITER, READER)


SLEEP = """
import subprocess
subprocess.Popen(["sleep", "30"], close_fds=False)
"""
FORK = """
import os, time
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("child_of_it", [SLEEP, FORK], ids=["program", "fork"])
def test_wait_fails_when_the_other_process_dies_while_its_child_lives(child_of_it: str, kind: signal.Signals) -> None:
    reader = Signals.create(2, num_slots=2)
    reader.join(READER)
    # Its own child outlives it, and must not keep the lock.
    program = CHILD.replace("print(", child_of_it.strip() + "\nprint(")
    child = subprocess.Popen(
        [sys.executable, "-c", program, reader.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "joined\n"
        wait(reader, WRITER, READER)
        threading.Timer(0.5, os.kill, (child.pid, kind)).start()
        # The message of a timeout is another one.
        with pytest.raises(PeerLostError, match="user 0: it has closed"):
            wait(reader, WRITER, READER, seconds=60)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        reader.unlink()
        reader.close()


CLOSED_WHILE_WAITING = """
import threading, time
from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.signals import Signals
signals = Signals.create(2, 2)
signals.join(1)
other = Signals.attach(signals.name, 2, 2)
other.join(0)
signals.unlink()
threading.Timer(0.5, signals.close).start()
try:
    signals.wait(0, 1, timeout_seconds=20, name="user 0")
except PeerLostError as error:
    print(error)
"""


def test_close_during_a_wait_of_another_thread_ends_the_wait() -> None:
    """In a process of its own, which would end with a segmentation fault."""
    ended = subprocess.run(
        [sys.executable, "-c", CLOSED_WHILE_WAITING], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "user 0: it has closed its staging buffer, or ended\n"), ended
