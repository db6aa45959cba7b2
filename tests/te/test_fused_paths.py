"""TransformerEngine's and Megatron's own computations for experts agree, forward and backward."""

from __future__ import annotations

import pytest

from tests.te.processes import NEEDS_TE, json_lines
from tests.te.simulation import CHOICE, PACKAGES

pytestmark = NEEDS_TE


@pytest.mark.parametrize("version", PACKAGES)
def test_permutations_and_the_routers_product_are_those_of_megatron(version: str) -> None:
    lines = json_lines("-m", "tests.te.fused_paths", **{CHOICE: version})
    assert [(line["case"], len(line["errors"])) for line in lines] == [
        ("there_and_back", 5),
        ("chunks", 4),
        ("router", 3),
    ]
    assert lines[-1]["found"] == (version == "2.9.0")
    assert max(error for line in lines for error in line["errors"]) < 1e-5
