"""The kernel tests of the doctor have correct arguments: TransformerEngine's own Python code accepts them."""

from __future__ import annotations

from tests.te.processes import NEEDS_TE, json_lines

pytestmark = NEEDS_TE

NAMES = ["layer with its norm", "grouped GEMM", "permutation of tokens", "fused Adam"]
"""All kernels except attention, which has no stand-in."""
PROGRAM = (
    "import sys; from tests.te.simulation import install; install(); "
    "from mcore_rl.doctor.kernels import KERNELS, call_each; call_each(KERNELS, 'cpu', sys.argv[1:])"
)


def test_every_call_is_taken() -> None:
    assert json_lines("-c", PROGRAM, *NAMES) == [{"kernel": name, "error": ""} for name in NAMES]
