"""What megatron-core 0.16.1 uses of DeepEP where `actor.moe.dispatcher` is deepep, against the Python of what the
index has of it: a source archive of 1.0.0, whose calls are those of the commit in docs/gpu.md (1.2.1, on no index), and
SGLang's build of 2.1.0."""

from __future__ import annotations

from dataclasses import fields

from mcore_rl.resolved.implementation import Choice, Implementation
from tests.contract.cuda.packages import DEEP_EP_1, DEEP_EP_2, MEGATRON, needs, sources
from tests.contract.cuda.uses import Use, uses

pytestmark = needs(DEEP_EP_1, DEEP_EP_2)

USERS = (MEGATRON / "transformer" / "moe" / "fused_a2a.py", MEGATRON / "transformer" / "moe" / "token_dispatcher.py")
INSTANCES = {"buffer": "deep_ep.Buffer", "_buffer": "deep_ep.Buffer", "after_event": "deep_ep.utils.EventOverlap",
             "after_event_overlap": "deep_ep.utils.EventOverlap"}  # fmt: skip
OTHER_BACKEND = {"deep_ep.HybridEPBuffer"}
"""Of moe_flex_dispatcher_backend=hybridep, which we never choose."""
MOVED = "deep_ep.utils.EventOverlap"
"""In 2.x deep_ep.EventOverlap. megatron takes the failing import for a missing package."""


def megatrons_uses() -> list[Use]:
    return [use for file in USERS for use in uses(file, "deep_ep", INSTANCES) if use.name not in OTHER_BACKEND]


def test_megatrons_use_is_found_in_its_files() -> None:
    names = {use.name for use in megatrons_uses() if use.call}
    assert {"deep_ep.Buffer", "deep_ep.Buffer.dispatch", "deep_ep.Buffer.combine", "deep_ep.Buffer.get_dispatch_layout",
            "deep_ep.utils.EventOverlap", "deep_ep.Buffer.set_num_sms"} <= names  # fmt: skip


def test_every_name_and_call_is_one_of_deep_ep_1() -> None:
    assert sources(DEEP_EP_1).problems(megatrons_uses()) == {}


def test_deep_ep_2_does_not_serve_megatron_for_one_name_that_has_moved() -> None:
    newer = sources(DEEP_EP_2)
    assert {name for name in newer.problems(megatrons_uses()) if not name.startswith(MOVED)} == set()
    assert newer.find(MOVED) is None
    assert newer.find("deep_ep.EventOverlap") is not None


def test_the_backend_that_we_choose_is_one_that_megatron_knows() -> None:
    other = {field.name: Choice("none", "") for field in fields(Implementation)}
    chosen = Implementation(**other | {"dispatcher": Choice("deepep", "")})
    assert chosen.arguments()["moe_token_dispatcher_type"] == "flex"
    text = USERS[1].read_text()
    assert f'moe_flex_dispatcher_backend == "{chosen.arguments()["moe_flex_dispatcher_backend"]}"' in text
