"""Execution of one command: transfer of its files, and its input and output, with limits of size, time and memory.

Packing and unpacking happen inside the sandbox, so that the host never opens a file that untrusted code created. Input
is a tar archive. Output is a length and the content of each file: a forged archive could contain links, devices, sparse
files, negative sizes and extended headers.
"""

from __future__ import annotations

import io
import os
import selectors
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import IO

from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.commands import Confinement, in_memory
from mcore_rl.sandbox.confinement.limits import MIB, RunLimits
from mcore_rl.sandbox.confinement.start import KILLED, Confined
from mcore_rl.sandbox.interface import Outcome, Why

RUN = r"""
in=$1 out=$2 fetched=$3; shift 3
tar -xf - <&"$in" && printf r >&"$out" || exit 125
eval "exec $in<&-"
if [ "$fetched" = 0 ]; then eval "exec $out>&-"; exec "$@"; fi
names=("${@:1:fetched}"); shift "$fetched"
(eval "exec $out>&-"; exec "$@")
code=$?
for name in "${names[@]}"; do
  if [[ -f $name && ! -L $name ]] && size=$(stat -c %s -- "$name" 2>/dev/null); then
    printf '%s\n' "$size" && head -c "$size" -- "$name"
  else
    printf -- '-\n'
  fi
done >&"$out" 2>/dev/null
exit $code
"""
"""Script for bash inside. Arguments: descriptor of the input archive, descriptor of the output, number of files to
return, their names, the command. Unpacks the archive, writes READY, runs the command, and writes for each file a line
with its length (or MISSING), then its content."""
READY, MISSING = b"r", b"-"
MAX_HEADER_BYTES = 20
"""Maximum digits of a length; a longer line is invalid."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """Pack files, all executable, into a tar archive.

    Raises: SandboxError for a path outside the working directory.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(check_path(path))
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def unpack(packed: bytes, wanted: Sequence[str]) -> dict[str, bytes]:
    """Parse the output of RUN; returns the regular files among `wanted`.

    Untrusted code can write anything to this stream, so only lengths are parsed, and the result is never larger than
    the input.

    Raises: SandboxError if the stream is malformed.
    """
    files, rest = {}, memoryview(packed)
    if not packed:
        return {}
    for path in wanted:
        header = bytes(rest[:MAX_HEADER_BYTES]).partition(b"\n")[0]
        rest = rest[len(header) + 1 :]
        if header == MISSING:
            continue
        if not header.isdigit() or int(header) > len(rest):
            raise SandboxError(f"files of the sandbox cannot be fetched: the length of {path} is damaged")
        files[path] = bytes(rest[: int(header)])
        rest = rest[int(header) :]
    if rest:
        raise SandboxError("files of the sandbox cannot be fetched: there is more data than the requested files")
    return files


def check_path(path: str) -> str:
    """Normalize a path below the working directory. Raises: SandboxError for other paths."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise SandboxError(f"file {path!r}: its path must be inside the working directory")
    return str(pure)


_CHUNK_BYTES = 1 << 16
_MEMORY_CHECK_SECONDS = 0.05
"""Interval of checks of the total memory."""


class Budget:
    """Byte limit shared by several streams; `full` is set once they exceed it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.reset()

    def reset(self) -> None:
        self._left = self._limit_bytes
        self.full = False

    def take(self, data: bytes) -> bytes:
        """Return the prefix of `data` within the remaining budget."""
        self.full = self.full or len(data) > self._left
        kept = data[: self._left]
        self._left -= len(kept)
        return kept


class PipeLoop:
    """Event loop over the pipes of a running sandbox."""

    def __init__(self, confined: Confined) -> None:
        self._confined = confined
        self._selector = selectors.DefaultSelector()
        self._budgets: list[Budget] = []
        self._num_open = 0

    def close(self) -> None:
        self._selector.close()

    def send(self, stream: IO[bytes], data: bytes, *, close: bool) -> None:
        """Queue `data` for writing while the loop runs. close: close the stream afterwards."""
        unsent = memoryview(data)
        # A blocking write of more than the pipe holds would stop the loop, and with it the time limit.
        os.set_blocking(stream.fileno(), False)

        def write() -> None:
            nonlocal unsent
            try:
                unsent = unsent[os.write(stream.fileno(), unsent[:_CHUNK_BYTES]) :]
            except BrokenPipeError:  # the program does not have to read its input
                unsent = memoryview(b"")
            if not unsent:
                self._selector.unregister(stream)
                if close:
                    stream.close()

        self._selector.register(stream, selectors.EVENT_WRITE, write)

    def receive(self, descriptor: int, budget: Budget) -> bytearray:
        """Read from `descriptor` while the loop runs. Returns the buffer, which grows up to the budget."""
        received = bytearray()

        def read() -> None:
            data = os.read(descriptor, _CHUNK_BYTES)
            received.extend(budget.take(data))
            if not data:
                self._selector.unregister(descriptor)
                self._num_open -= 1

        self._budgets.append(budget)
        self._selector.register(descriptor, selectors.EVENT_READ, read)
        self._num_open += 1
        return received

    def until(self, done: Callable[[], bool], seconds: float) -> Why:
        """Run the loop until `done` returns True, a limit is exceeded, or all streams have ended."""
        deadline = time.monotonic() + seconds
        next_check = time.monotonic() + _MEMORY_CHECK_SECONDS
        while self._num_open and not done():
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= next_check:
                # Not after every event: without control groups, a check reads the memory of every process.
                if self._confined.memory_exceeded():
                    return "memory"
                next_check = time.monotonic() + _MEMORY_CHECK_SECONDS
            self._poll(min(deadline, next_check) - now)
            if any(budget.full for budget in self._budgets):
                return "output"
        return "exit"

    def drain(self) -> Why:
        """Read data that is already available, without waiting."""
        # A cell's result has its own pipe and can arrive before output that the program wrote earlier.
        while self._poll(0):
            if any(budget.full for budget in self._budgets):
                return "output"
        return "exit"

    def _poll(self, seconds: float) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            key.data()
        return bool(ready)


def execute(
    confinement: Confinement,
    command: list[str],
    limits: RunLimits,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes],
    fetch: tuple[str, ...] = (),
) -> Outcome:
    """Run a command in a new sandbox. Raises: SandboxError if it did not start."""
    names = [check_path(name) for name in fetch]
    parcel = in_memory("files", pack(files))
    reader, writer = os.pipe()
    inside = ["/bin/bash", "-c", RUN, "sandbox", str(parcel), str(writer), str(len(names)), *names, *command]
    try:
        try:
            confined = Confined(confinement, inside, limits, inherited=(parcel, writer))
        finally:
            # `reader` reaches its end only when no process holds the other end any more.
            os.close(parcel)
            os.close(writer)
        return _follow(confined, limits, stdin, reader, fetch)
    finally:
        os.close(reader)


def _follow(confined: Confined, limits: RunLimits, stdin: bytes, parcel: int, fetch: tuple[str, ...]) -> Outcome:
    started = time.monotonic()
    process, pipes, output = confined.process, PipeLoop(confined), Budget(limits.output_kib << 10)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        pipes.send(process.stdin, stdin, close=True)
        stdout = pipes.receive(process.stdout.fileno(), output)
        stderr = pipes.receive(process.stderr.fileno(), output)
        packed = pipes.receive(parcel, Budget((limits.tmp_mib + 1) * MIB))
        why = pipes.until(lambda: False, limits.seconds)
        if why == "exit" and not confined.wait(max(0.0, limits.seconds - (time.monotonic() - started))):
            why = "timeout"
        if confined.memory_exceeded():
            why = "memory"
    finally:
        pipes.close()
        code = confined.end()
    message = stderr.decode("utf-8", "replace")
    if why == "exit" and not packed.startswith(READY):
        raise SandboxError(f"the sandbox did not start: {message.strip() or f'it ended with code {code}'}")
    files = unpack(bytes(packed[len(READY) :]), fetch) if why == "exit" else {}
    return_code, seconds = code if why == "exit" else KILLED, time.monotonic() - started
    return Outcome(why, return_code, stdout.decode("utf-8", "replace"), message, seconds, files)
