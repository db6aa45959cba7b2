"""Slices that a rank sends in a weight sync."""

from __future__ import annotations

from typing import Any

from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import Slice
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.topology import Endpoint, Topology


def sync_plan(actor: Any) -> SyncPlan:
    """Plan a sync of the actor's ranks to an engine with one rank. This rank must train no weight that it freezes."""
    here = Endpoint(this_host(), "127.0.0.1")
    topology = Topology((here,) * actor.layout.world_size, (here,), 1)
    plan: SyncPlan = actor.sync_plan(EngineLayout(), topology, 1 << 14, 2)
    actor.require_frozen(plan)
    return plan


def synced_slices(actor: Any) -> list[Slice]:
    """List the slices that the actor's rank sends to an engine with one rank."""
    plan = sync_plan(actor)
    messages = [message for sync_round in plan.outgoing(actor.rank).values() for message in sync_round]
    return [each for message in messages for each in message.slices]
