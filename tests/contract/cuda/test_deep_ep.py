"""DeepEP as megatron-core 0.16.1 uses it with `actor.moe.dispatcher=deepep`, checked against its Python sources.

The index has a source archive of 1.0.0, with the same calls as the commit in docs/gpu.md (1.2.1, on no index), and
SGLang's build of 2.1.0.
"""

from __future__ import annotations

from dataclasses import fields

from mcore_rl.resolved.implementation import Component, Implementation
from tests.contract.cuda.packages import DEEP_EP_1, DEEP_EP_2, MEGATRON, needs, sources
from tests.contract.cuda.uses import Use, uses

pytestmark = needs(DEEP_EP_1, DEEP_EP_2)

USERS = (MEGATRON / "transformer" / "moe" / "fused_a2a.py", MEGATRON / "transformer" / "moe" / "token_dispatcher.py")
INSTANCES = {"buffer": "deep_ep.Buffer", "_buffer": "deep_ep.Buffer", "after_event": "deep_ep.utils.EventOverlap",
             "after_event_overlap": "deep_ep.utils.EventOverlap"}  # fmt: skip
OTHER_BACKEND = {"deep_ep.HybridEPBuffer"}
"""Used with moe_flex_dispatcher_backend=hybridep, which is never selected here."""
MOVED = "deep_ep.utils.EventOverlap"
"""Moved to deep_ep.EventOverlap in 2.x. megatron treats the failing import as a missing package."""


def megatrons_uses() -> list[Use]:
    return [use for file in USERS for use in uses(file, "deep_ep", INSTANCES) if use.name not in OTHER_BACKEND]


def test_uses_megatron_files_call_deep_ep() -> None:
    names = {use.name for use in megatrons_uses() if use.call}
    assert {"deep_ep.Buffer", "deep_ep.Buffer.dispatch", "deep_ep.Buffer.combine", "deep_ep.Buffer.get_dispatch_layout",
            "deep_ep.utils.EventOverlap", "deep_ep.Buffer.set_num_sms"} <= names  # fmt: skip


def test_uses_of_megatron_match_deep_ep_1() -> None:
    assert sources(DEEP_EP_1).problems(megatrons_uses()) == {}


def test_uses_of_megatron_fail_with_deep_ep_2_for_moved_name() -> None:
    newer = sources(DEEP_EP_2)
    assert {name for name in newer.problems(megatrons_uses()) if not name.startswith(MOVED)} == set()
    assert newer.find(MOVED) is None
    assert newer.find("deep_ep.EventOverlap") is not None


def test_dispatcher_backend_is_known_to_megatron() -> None:
    other = {field.name: Component("none", "") for field in fields(Implementation)}
    chosen = Implementation(**other | {"dispatcher": Component("deepep", "")})
    assert chosen.arguments()["moe_token_dispatcher_type"] == "flex"
    text = USERS[1].read_text()
    assert f'moe_flex_dispatcher_backend == "{chosen.arguments()["moe_flex_dispatcher_backend"]}"' in text
