"""Files on their way into a sandbox and out of it, packed and unpacked inside: the host never opens a file that code
could have made. They go in as a tar archive. They come out with nothing but their lengths: an archive that code can
forge has links, devices, sparse files, negative sizes and extended headers, none of which is needed."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from mcore_rl.errors import SandboxError

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
"""For bash inside: unpacks the archive of descriptor $1, writes READY to descriptor $2, runs the command, and writes
the $3 files whose names come before it: the length of each in a line, or MISSING, then the content."""
READY, MISSING = b"r", b"-"
MAX_HEADER_BYTES = 20
"""Digits of a length; a longer line is damaged."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """A tar archive; everything in it may be executed.

    Raises: SandboxError for a path that leads elsewhere.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(check_path(path))
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def unpack(packed: bytes, wanted: Sequence[str]) -> dict[str, bytes]:
    """The regular files among `wanted`, in the form that RUN writes. Code inside may have written anything into it, so
    only lengths are read, and no more is returned than was received.

    Raises: SandboxError if it is damaged.
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
        raise SandboxError("files of the sandbox cannot be fetched: more was written than asked for")
    return files


def check_path(path: str) -> str:
    """A path below the working directory, in its shortest form."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise SandboxError(f"file {path!r}: its path has to lead below the working directory")
    return str(pure)
