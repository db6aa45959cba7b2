"""resolved/attention.py and TransformerEngine select the same attention backend on every simulated GPU."""

from __future__ import annotations

import pytest

from mcore_rl.resolved.attention import BACKENDS, HeadDims
from mcore_rl.resolved.installed import Installed
from tests.te.backends import Asked, cases
from tests.te.processes import NEEDS_TE, json_lines

pytestmark = NEEDS_TE


@pytest.fixture(scope="module")
def answers() -> list[tuple[Asked, dict[str, bool]]]:
    return list(zip(cases(), json_lines("-m", "tests.te.backends"), strict=True))


def _takes(asked: Asked) -> dict[str, bool]:
    """Return the backends that resolved/attention.py allows."""
    installed = Installed(True, asked.capability, "2.11.0", asked.flash, asked.flash_3)
    bfloat16 = asked.dtype == "bfloat16"
    return {each.name: bfloat16 and not each.lacks(installed, HeadDims(*asked.heads)) for each in BACKENDS}


def test_flash_attention_takes_what_the_table_says(answers: list[tuple[Asked, dict[str, bool]]]) -> None:
    wrong = []
    for asked, found in answers:
        ours = _takes(asked)
        if found["flash"] != (ours["FlashAttention 2"] or ours["FlashAttention 3"]):
            wrong.append((asked, found))
    assert wrong == []
    assert 50 < sum(found["flash"] for _, found in answers) < len(answers) / 2


def test_the_table_gives_cudnn_nothing_that_is_refused_before_it(answers: list[tuple[Asked, dict[str, bool]]]) -> None:
    assert [asked for asked, found in answers if _takes(asked)["FusedAttention"] and not found["fused"]] == []
    assert any(_takes(asked)["FusedAttention"] for asked, _ in answers)
