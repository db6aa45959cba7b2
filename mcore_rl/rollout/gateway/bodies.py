"""Bodies of requests: limited, strict JSON."""

from __future__ import annotations

from fastapi import Request

from mcore_rl.data.json_text import parse_json
from mcore_rl.errors import DataError
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.tools.strict_json import DECODER
from mcore_rl.types.json import JsonObject


async def json_body(request: Request, max_bytes: int) -> JsonObject:
    """Read the JSON object in a body; an empty body is an empty object.

    Raises: RefusedError with status 413 before more than `max_bytes` are read, or 400 for anything but an object in
    strict JSON (no NaN, no halves of surrogate pairs, limited nesting) and UTF-8.
    """
    data = await _limited(request, max_bytes)
    try:
        value = parse_json(data.decode(), "the body", DECODER.decode) if data.strip() else {}
    except UnicodeDecodeError as error:
        raise RefusedError(
            400, f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except DataError as error:
        raise RefusedError(400, str(error)) from None
    if not isinstance(value, dict):
        raise RefusedError(400, "the body must be a JSON object")
    return value


async def _limited(request: Request, max_bytes: int) -> bytes:
    refusal = RefusedError(413, f"the body has more than {max_bytes} bytes; shorten the conversation")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise refusal
    data = bytearray()
    async for chunk in request.stream():  # without Content-Length
        data += chunk
        if len(data) > max_bytes:
            raise refusal
    return bytes(data)
