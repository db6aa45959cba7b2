"""File servers that do not answer: waits end in time with the name of the file, and no process is kept alive."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rl.errors import StorageError
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files import threads
from mcore_rl.weights.transports.files.fetch import Fetch
from mcore_rl.weights.transports.files.manifest import FileFacts, data_name, encode, manifest_name
from mcore_rl.weights.transports.files.writer import TransferWriter
from mcore_rl.weights.transports.link import MessageKind, MessageTag

TAG = MessageTag(MessageKind.WEIGHTS, 0, 0)
NAME = data_name(0, 0, TAG)
NO_ANSWER = r"{name}: no answer within 0\.2 s \(cluster\.collective_timeout_seconds\); check that every host reaches"


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.3)


def stall(path: Path) -> None:
    """Make a pipe, which blocks whoever opens it, in place of a file on a server that does not answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


def stalled_folder(tmp_path: Path, *, manifest: bool) -> SharedFolder:
    """Write a transfer of one file whose manifest, or whose content, cannot be read."""
    folder = SharedFolder("weights.directory", str(tmp_path))
    if manifest:
        stall(tmp_path / manifest_name(0, 0, 0))
    else:
        folder.put(manifest_name(0, 0, 0), memoryview(encode({NAME: FileFacts.of(b"content")})))
        stall(tmp_path / NAME)
    return folder


def take(fetch: Fetch) -> None:
    fetch.take(0, TAG)


def poll(fetch: Fetch) -> None:
    while not fetch.is_done():
        pass


@pytest.mark.parametrize("wait", [take, poll])
@pytest.mark.parametrize("manifest", [False, True])
def test_fetch_without_an_answer_names_the_file(wait: Callable[[Fetch], None], manifest: bool, tmp_path: Path) -> None:
    folder = stalled_folder(tmp_path, manifest=manifest)
    fetch = Fetch(folder, 0, 0, [0], name=str, timeout_seconds=0.2)
    with pytest.raises(StorageError, match=NO_ANSWER.format(name=manifest_name(0, 0, 0) if manifest else NAME)):
        wait(fetch)
    fetch.close()


@pytest.mark.parametrize("manifest", [False, True])
def test_write_without_an_answer_names_the_file_and_close_returns(manifest: bool, tmp_path: Path) -> None:
    name = Path(manifest_name(0, 0, 0) if manifest else NAME)
    stall(tmp_path / name.with_name(f".{name.name}.part"))
    writer = TransferWriter(SharedFolder("weights.directory", str(tmp_path)), 0, 0.2)
    written = writer.put(torch.zeros(8, dtype=torch.uint8), TAG)
    wait = writer.finish if manifest else written.wait
    with pytest.raises(StorageError, match=NO_ANSWER.format(name=name)):
        wait()
    writer.close()


FETCH_AND_END = """
import sys, time
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files.fetch import Fetch
fetch = Fetch(SharedFolder("weights.directory", sys.argv[1]), 0, 0, [0], name=str, timeout_seconds=60)
while not fetch._threads._threads:
    time.sleep(0.01)
print("reads", fetch.is_done())
fetch.close()
"""


def test_file_server_without_an_answer_keeps_no_process_alive(tmp_path: Path) -> None:
    stalled_folder(tmp_path, manifest=False)
    ended = subprocess.run(
        [sys.executable, "-c", FETCH_AND_END, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "reads False\n"), ended.stderr
