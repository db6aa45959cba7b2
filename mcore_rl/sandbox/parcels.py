"""Files on their way into a sandbox and out of it: as tar archives, packed and unpacked inside, so that the host never
opens a file that code could have made."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
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
tar -cf - -- "${names[@]}" >&"$out" 2>/dev/null
exit $code
"""
"""For bash inside: unpacks what descriptor $1 has, says so on descriptor $2, runs the command, and packs the $3 files
whose names come before it."""
READY = b"r"


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


def unpack(packed: bytes, wanted: Iterable[str]) -> dict[str, bytes]:
    """The regular files of that name. `packed` is what code inside wanted it to be: damaged, at worst.

    Raises: SandboxError where it is no archive.
    """
    names = {check_path(path): path for path in wanted}
    files = {}
    if not packed:
        return {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            for entry in archive:
                content = archive.extractfile(entry) if entry.isreg() and entry.name in names else None
                if content is not None:
                    files[names[entry.name]] = content.read()
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise SandboxError(f"files of the sandbox cannot be fetched: {error}") from error
    return files


def check_path(path: str) -> str:
    """A path below the working directory, in its shortest form."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise SandboxError(f"file {path!r}: its path has to lead below the working directory")
    return str(pure)
