"""Signals that stop a run, and the death of Ray's daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from mcore_rl.errors import ClusterDiedError
from mcore_rl.runtime import stops
from mcore_rl.runtime.daemons import Daemons
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.stops import STOPS


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    with STOPS.listening():
        yield


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every signal, even if it follows another at once."""
    monkeypatch.setattr(stops, "SECONDS_OF_ONE_STOP", 0.0)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stops_first_signal_waits_for_the_step(number: int, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    STOPS.begin(7)
    assert not STOPS.requested()
    send(number)
    assert STOPS.requested()
    assert Watch().get([]) == []
    assert capfd.readouterr().err == "finishing step 7, then saving; a second signal stops at once\n"
    assert STOPS.exit_code() == code


@pytest.mark.usefixtures("apart")
def test_stops_second_signal_interrupts() -> None:
    STOPS.begin(7)
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    assert STOPS.exit_code() == 143


def test_stops_signals_to_process_and_group_count_once() -> None:
    STOPS.begin(7)
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert STOPS.requested()


@pytest.mark.usefixtures("apart")
def test_stops_first_signal_after_usr1_waits_too() -> None:
    STOPS.begin(7)
    send(signal.SIGUSR1)
    send(signal.SIGTERM)
    assert STOPS.exit_code() == 143


def test_stops_signal_before_the_first_step_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    assert STOPS.exit_code() == 143


def test_stops_swallowed_interrupt_is_raised_by_the_next_wait() -> None:
    with pytest.raises(KeyboardInterrupt, match="signal 15"):
        send(signal.SIGTERM)  # as if a callback had caught it
    with pytest.raises(KeyboardInterrupt, match="signal 15"):
        Watch().get(["a reference that is never looked at"])
    assert Watch().get([]) == []


def test_stops_usr1_interrupts_nothing() -> None:
    for _ in range(2):
        send(signal.SIGUSR1)
        assert Watch().get([]) == []
        assert STOPS.requested()
    assert STOPS.exit_code() == os.EX_TEMPFAIL


def test_stops_new_run_has_no_requests() -> None:
    STOPS.begin(7)
    send(signal.SIGINT)
    with STOPS.listening():
        assert not STOPS.requested()
        with pytest.raises(KeyboardInterrupt):  # nor the step
            send(signal.SIGINT)


def ended() -> Daemons:
    """Return the daemons of a cluster whose GCS has ended."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    seen = psutil.Process(process.pid)
    process.wait()
    return Daemons({"gcs_server": seen})


def test_watch_with_dead_daemons_raises_at_once() -> None:
    with pytest.raises(ClusterDiedError, match="gcs_server"):
        Watch(daemons=ended()).get(["a reference that is never looked at"])


def test_watch_with_dead_daemons_after_a_signal_is_a_stop() -> None:
    STOPS.begin(7)
    send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        Watch(daemons=ended()).get(["a reference that is never looked at"])
    assert STOPS.exit_code() == 143


STUCK = """
import os, signal, subprocess, sys, time
import psutil
from mcore_rl.runtime import daemons
from mcore_rl.runtime.stops import STOPS

daemons.SECONDS_BETWEEN_LOOKS = daemons.SECONDS_TO_RETURN = 0.2
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
guard = daemons.Guard(STOPS.give_up)
guard.watch(daemons.Daemons({"gcs_server": psutil.Process(process.pid)}))
with STOPS.listening(lambda: "step 3 is saved"):
    STOPS.begin(4)
    if sys.argv[1] == "asked":
        os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == "intended":
        guard.let_end()
    process.kill()
    process.wait()
    time.sleep(2)  # a call of Ray that does not return
    print("came back")
"""


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("unasked", 1, "error: Ray's gcs_server died, and with it every process of the run"),
        ("asked", 143, "stopped: step 3 is saved"),
        ("intended", 0, "came back"),
    ],
)
def test_ray_call_that_hangs_without_its_cluster_is_abandoned(how: str, code: int, last: str) -> None:
    found = subprocess.run([sys.executable, "-c", STUCK, how], capture_output=True, text=True, check=False)
    assert (found.returncode, (found.stderr + found.stdout).splitlines()[-1]) == (code, last)


def test_stops_swallowed_by_a_callback_ends_the_next_wait_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    class Finalized:
        def __del__(self) -> None:
            send(signal.SIGTERM)

    reader, writer = os.pipe()
    end_of_wait = threading.Timer(60, os.close, (writer,))
    end_of_wait.start()
    with pytest.raises(KeyboardInterrupt):
        _finalize_and_wait(Finalized(), reader)
    assert end_of_wait.is_alive()
    end_of_wait.cancel()
    end_of_wait.join()
    os.close(writer)
    os.close(reader)
    assert STOPS.exit_code() == 143
    assert "Traceback" not in capfd.readouterr().err


def _finalize_and_wait(finalized: object, reader: int) -> None:
    del finalized
    os.read(reader, 1)


def test_stops_leaves_other_unraisable_errors_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError

    seen: list[sys.UnraisableHookArgs] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with STOPS.listening():
        Broken()
    assert [each.exc_type for each in seen] == [ValueError]
