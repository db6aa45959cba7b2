"""The calls by which doctor tries TransformerEngine's kernels on a GPU are right: its own Python takes them."""

from __future__ import annotations

from tests.te.processes import NEEDS_TE, json_lines

pytestmark = NEEDS_TE

NAMES = ["layer with its norm", "grouped GEMM", "permutation of tokens", "fused Adam"]
"""All but attention, whose kernels have no stand-in."""
PROGRAM = (
    "import sys; from tests.te.simulation import install; install(); "
    "from mcore_rl.doctor.kernels import KERNELS, call_each; call_each(KERNELS, 'cpu', sys.argv[1:])"
)


def test_every_call_is_taken() -> None:
    assert json_lines("-c", PROGRAM, *NAMES) == [{"kernel": name, "error": ""} for name in NAMES]
