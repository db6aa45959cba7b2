"""SandboxFusion's requests of cells: POST /run_jupyter, whose state ends with the request.

Source: bytedance/SandboxFusion, fields of 2026. Its cells run in a Jupyter kernel; ours in plain Python, where the
value of a last expression is shown as text, and there are no magic commands. A cell that raised does not keep later
ones from running.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.sandbox import notebook
from mcore_rl.sandbox.code_requests import Kinds, answered, read_fields, result_of
from mcore_rl.sandbox.interface import Outcome, Program, Sandbox

KERNELS = ("python3", "python")
NOTEBOOK = Path(notebook.__file__).read_text()
_KINDS: Kinds = {
    "cells": list, "cell_timeout": (int, float), "total_timeout": (int, float), "memory_limit_MB": int,
    "kernel": str, "files": dict, "fetch_files": list,
}  # fmt: skip


def read(body: bytes) -> Callable[[Sandbox], dict[str, Any]]:
    """What answers the request. Raises: ValueError that names the field."""
    fields = read_fields(body, _KINDS, required=("cells",))
    if not all(isinstance(cell, str) for cell in fields["cells"]):
        raise ValueError("field cells has something that is no text")
    if fields.get("kernel", KERNELS[0]) not in KERNELS:
        raise ValueError(f"field kernel: {fields['kernel']} is not here, only {' and '.join(KERNELS)}")
    total = float(fields.get("total_timeout", 45))
    # 0: as long as all may take together.
    cells = {"cells": fields["cells"], "cell_timeout": max(0.0, float(fields.get("cell_timeout", 0)))}
    program = Program(
        code=NOTEBOOK,
        files={**fields["files"], notebook.CELLS: json.dumps(cells).encode()},
        fetch=fields["fetch_files"],
        seconds=total,
        memory_mib=fields["memory_mib"],
    )
    return lambda sandbox: answered(sandbox, program, {"driver": None, "cells": []}, _fields)


def _fields(outcome: Outcome) -> dict[str, Any]:
    cells = [cell for line in outcome.stdout.splitlines() if (cell := _cell(line)) is not None]
    good = outcome.ok and not any(cell["error"] for cell in cells)
    return {
        "status": "Success" if good else "Failed",
        "driver": {**result_of(outcome), "stdout": ""},
        "cells": cells,
    }


def _cell(line: str) -> dict[str, Any] | None:
    """A cell's result; None for what is none: the last line of a run that was ended, or what a cell has forged."""
    try:
        found = json.loads(line)
        display = [{str(kind): str(text) for kind, text in shown.items()} for shown in found["display"]]
        return {
            "stdout": str(found["stdout"]),
            "stderr": str(found["stderr"]),
            "display": display,
            "error": [_error(each) for each in found["error"]],
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _error(found: Mapping[str, Any]) -> dict[str, Any]:
    """Text only: a cell may have nested anything in it."""
    lines = [str(line) for line in found["traceback"]]
    return {"ename": str(found["ename"]), "evalue": str(found["evalue"]), "traceback": lines}
