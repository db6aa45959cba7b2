"""Transfer of files into and out of a sandbox.

Packing and unpacking happen inside the sandbox, so that the host never opens a file that untrusted code created. Input
is a tar archive. Output is a length and the content of each file: a forged archive could contain links, devices, sparse
files, negative sizes and extended headers.
"""

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
    files, stream = {}, io.BytesIO(packed)
    for path in wanted if packed else ():
        length = stream.readline(MAX_HEADER_BYTES + 1).removesuffix(b"\n")
        if length == MISSING:
            continue
        if not length.isdigit() or int(length) > len(packed) - stream.tell():
            raise SandboxError(f"files of the sandbox cannot be fetched: the length of {path} is damaged")
        files[path] = stream.read(int(length))
    if stream.read(1):
        raise SandboxError("files of the sandbox cannot be fetched: there is more data than the requested files")
    return files


def check_path(path: str) -> str:
    """Normalize a path below the working directory. Raises: SandboxError for other paths."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise SandboxError(f"file {path!r}: its path must be inside the working directory")
    return str(pure)
