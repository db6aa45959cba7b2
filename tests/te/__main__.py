"""Results of simulated TransformerEngine, a JSON line per case: `python -m tests.te PART...`. A part is `paths`,
`kernels`, `backends`, or a model family. It needs a process of its own, because Megatron must be imported under the
simulation."""

from __future__ import annotations

import tests.te.everywhere  # noqa: F401  first, before any import of megatron

# isort: split
import json
import sys
from collections.abc import Iterable
from typing import Any

from mcore_rl.doctor.kernels import KERNELS, call_each
from tests.te.backends import answer, cases
from tests.te.compare import compare
from tests.te.fused_paths import compare_paths

CALLED = ["layer with its norm", "grouped GEMM", "permutation of tokens", "fused Adam"]
"""All kernels except attention, which has no stand-in."""


def _results(part: str) -> Iterable[dict[str, Any]]:
    if part == "paths":
        return compare_paths()
    return map(answer, cases()) if part == "backends" else [compare(part)]


for each in sys.argv[1:]:
    if each == "kernels":
        call_each(KERNELS, "cpu", CALLED)  # prints its results
        continue
    for result in _results(each):
        print(json.dumps(result), flush=True)
