"""SandboxFusion's requests of whole programs: POST /run_code. Source: bytedance/SandboxFusion, fields of 2026."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.interface import Outcome, Program, Sandbox

Kinds = Mapping[str, type | tuple[type, ...]]
_KINDS: Kinds = {
    "code": str, "language": str, "compile_timeout": (int, float), "run_timeout": (int, float),
    "memory_limit_MB": int, "stdin": (str, type(None)), "files": dict, "fetch_files": list,
}  # fmt: skip


def read(body: bytes) -> Callable[[Sandbox], dict[str, Any]]:
    """What answers the request. Raises: ValueError that names the field."""
    fields = read_fields(body, _KINDS, required=("code", "language"))
    program = Program(
        code=fields["code"],
        language=fields["language"],
        stdin=fields.get("stdin") or "",
        files=fields["files"],
        fetch=fields["fetch_files"],
        seconds=float(fields.get("run_timeout", 10)),
        compile_seconds=float(fields.get("compile_timeout", 10)),
        memory_mib=fields["memory_mib"],
    )
    empty = {"compile_result": None, "run_result": None}
    return lambda sandbox: answered(sandbox, program, empty, _fields)


def read_fields(body: bytes, kinds: Kinds, required: tuple[str, ...]) -> dict[str, Any]:
    """The fields, of the right kinds; `files` as bytes, `fetch_files` as names, and `memory_mib`, None: unlimited.

    Raises: ValueError that names the field.
    """
    try:
        fields: dict[str, Any] = {"files": {}, "fetch_files": [], **json.loads(body)}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the request is no JSON object: {error}") from None
    for name in required:
        if name not in fields:
            raise ValueError(f"field {name} is missing")
    for name, kind in kinds.items():
        if name in fields and (not isinstance(fields[name], kind) or isinstance(fields[name], bool)):
            raise ValueError(f"field {name} has the wrong type")
    memory_mib = fields.get("memory_limit_MB", -1)
    files = {path: _decoded(path, content) for path, content in fields["files"].items() if content is not None}
    fetch = tuple(map(str, fields["fetch_files"]))
    return fields | {"files": files, "fetch_files": fetch, "memory_mib": memory_mib if memory_mib > 0 else None}


def result_of(outcome: Outcome) -> dict[str, Any]:
    """How a command ended, in SandboxFusion's fields."""
    late = outcome.why == "timeout"
    return {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": outcome.seconds,
        "return_code": None if late else outcome.return_code,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
    }


def _decoded(path: str, content: object) -> bytes:
    try:
        return base64.b64decode(str(content), validate=True)
    except binascii.Error:
        raise ValueError(f"field files: {path} is not in base64") from None


def answered(
    sandbox: Sandbox, program: Program, empty: Mapping[str, Any], fields_of: Callable[[Outcome], dict[str, Any]]
) -> dict[str, Any]:
    """Runs it; the fields of every answer and those of this kind: `fields_of` what came of it, `empty` where it could
    not be run at all."""
    answer: dict[str, Any] = {
        "status": "SandboxError", "message": "", "executor_pod_name": None, "files": {}, **empty,
    }  # fmt: skip
    try:
        outcome = sandbox.run(program)
    except SandboxError as error:
        return {**answer, "message": str(error)}
    message = "" if outcome.why in ("exit", "timeout") else f"ended at its limit of {outcome.why}"
    files = {path: base64.b64encode(content).decode() for path, content in outcome.files.items()}
    return {**answer, "message": message, "files": files, **fields_of(outcome)}


def _fields(outcome: Outcome) -> dict[str, Any]:
    compilation = outcome if outcome.stage == "compile" else outcome.compilation
    return {
        "status": "Success" if outcome.ok else "Failed",
        "compile_result": result_of(compilation) if compilation else None,
        "run_result": result_of(outcome) if outcome.stage == "run" else None,
    }
