"""Calls of a step to trainer and critic ranks, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.roles.critic import ValuedBatch
from mcore_rl.megatron.step.loss.rank_batch import RankBatch
from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.roles.base import HeldBatch
from mcore_rl.runtime.roles.critic import CriticGroup, CriticProcess
from mcore_rl.runtime.roles.groups import RankMap
from mcore_rl.runtime.roles.trainer import TrainerGroup, TrainerProcess
from mcore_rl.runtime.trajectory_store import FetchRequest
from mcore_rl.types import Batch, Mean, RankShare, TokenRefs, Total
from tests.unit.rollouts import batch_of
from tests.unit.runtime.made import EndedWatch, chunk

CHUNKS = (("a 7 [0, 3]",), ("a 7 [1, 2]",))
"""Trajectories that each rank receives."""


class RecordedActor:
    """Fake MegatronActor. Records each call with its samples, advantages and trajectories."""

    class estimator:
        class needs:
            values = False

    averages: Mapping[int, object] = MappingProxyType({})

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.entropy_coefficient: float | None = None

    def note(self, call: str, shares: Sequence[RankShare], chunks: Sequence[object]) -> None:
        samples = [share.samples.tolist() for share in shares]
        advantages = [float(advantage) for share in shares for advantage in share.advantages]
        self.calls.append((call, samples, advantages, tuple(chunks)))

    def recompute_logp(self, shares: list[RankShare], chunks: list[object]) -> tuple[RankBatch, dict[str, object]]:
        self.note("logp", shares, chunks)
        return RankBatch(shares, chunks), {"recomputed": Total(len(shares))}

    def reference_logp(self, batch: RankBatch) -> RankBatch:
        self.note("reference", batch.shares, batch.chunks)
        return replace(batch, ref_logp={0: torch.zeros(1)})

    def estimate(self, batch: RankBatch, values: object) -> tuple[RankBatch, dict[str, object], dict[int, np.ndarray]]:
        self.note("estimate", batch.shares, batch.chunks)
        return replace(batch, token_advantages={0: np.ones(1, np.float32)}), {"estimated": Total(1)}, {}

    def kl_penalties(self, batch: RankBatch, coefficient: float) -> tuple[RankBatch, dict[str, object]]:
        assert batch.ref_logp, "what the reference's pass found is gone"
        self.note("penalties", batch.shares, batch.chunks)
        halves = np.array([coefficient / 2] * 2, np.float32)
        own = {int(sample): halves for share in batch.shares for sample in share.samples}
        return replace(batch, penalties=own), {"penalized": Total(1)}

    def update(self, batch: RankBatch, index: int) -> dict[str, object]:
        self.entropy_coefficient = batch.entropy_coefficient
        self.note(f"update {index}", batch.shares[index : index + 1], batch.chunks)
        return {"updated": Mean(1.0, 1)}

    def gather_parameters(self) -> None:
        self.calls.append(("gather",))


class Rank(ProcessHandle[object]):
    """Rank in this process. A call runs at once; its result is its own reference."""

    def __init__(self, rounds: list[str], process: type[Any] = TrainerProcess) -> None:
        super().__init__("rank", cast(Any, self))
        self.process = process("rank")
        self.process.actor, self.process._held = RecordedActor(), HeldBatch()
        self.rounds = rounds

    def __getattr__(self, name: str) -> object:
        """Return a remote method of the actor, which is this object too."""

        def call(*arguments: object) -> object:
            self.rounds.append(name)
            return getattr(self.process, name)(*arguments)

        return SimpleNamespace(remote=call)

    def call_for_two(self, method: object, request: FetchRequest) -> object:  # RunProcess.fetch
        (producer,), (key,) = request.producers, request.keys
        return None, f"{producer} {key} {request.rows.tolist()}"


def make() -> tuple[TrainerGroup, list[str], list[list[tuple[object, ...]]]]:
    """Return a group of two data-parallel ranks, the names of calls (one per rank), and the calls of each rank."""
    rounds: list[str] = []
    handles = [Rank(rounds), Rank(rounds)]
    group = TrainerGroup(handles, (0, 1), EndedWatch(), RankMap((0, 1), (0, 1)), Stages())  # type: ignore[arg-type]
    return group, rounds, [handle.process.actor.calls for handle in handles]


def batch(num_updates: int) -> Batch:
    """Build a batch of four samples; the first and the last are on rank 0."""
    advantages = np.arange(4, dtype=np.float32)
    return batch_of([0, 1, 1, 0], num_updates, chunks=(chunk("a", None, 7),), advantages=advantages)


def test_update_with_one_update_is_one_call() -> None:
    group, rounds, ranks = make()
    handle = group.recompute_logp(batch(1))
    assert handle.metrics == {}
    assert group.update(handle) == {"recomputed": Total(2), "updated": Mean(2.0, 2)}
    assert rounds == ["update"] * 2
    first, second = [0, 3], [1, 2]
    for calls, samples, chunks in zip(ranks, (first, second), CHUNKS, strict=True):
        advantages = [float(sample) for sample in samples]
        assert calls == [
            ("logp", [samples], advantages, chunks),
            ("update 0", [samples], advantages, chunks),
            ("gather",),
        ]


@pytest.mark.parametrize("num_updates", [1, 2])
def test_update_sends_the_entropy_coefficient(num_updates: int) -> None:
    group, _, _ = make()
    group.update(replace(group.recompute_logp(batch(num_updates)), entropy_coefficient=0.25))
    ranks: list[Any] = list(group.processes)
    assert [rank.process.actor.entropy_coefficient for rank in ranks] == [0.25, 0.25]


def test_update_with_several_updates_sends_batch_with_logp() -> None:
    group, rounds, ranks = make()
    handle = group.recompute_logp(batch(2))
    assert handle.metrics == {"recomputed": Total(4)}
    assert group.update(handle) == {"updated": Mean(4.0, 4)}
    assert rounds == ["recompute_logp"] * 2 + ["update"] * 2
    assert [call[:2] for call in ranks[0]] == [
        ("logp", [[0], [3]]),
        ("update 0", [[0]]),
        ("update 1", [[3]]),
        ("gather",),
    ]


def test_batch_is_sent_once_with_the_first_call() -> None:
    group, rounds, ranks = make()
    handle = group.reference_logp(group.recompute_logp(batch(1)))
    assert handle.metrics == {"recomputed": Total(2)}
    handle, _ = group.estimate(handle, None)
    assert handle.metrics == {"recomputed": Total(2), "estimated": Total(2)}
    assert group.update(handle) == {"updated": Mean(2.0, 2)}
    assert rounds[::2] == ["recompute_logp", "reference_logp", "estimate", "update"]
    assert [call[0] for call in ranks[1]] == ["logp", "reference", "estimate", "update 0", "gather"]


def test_with_advantages_replaces_shares_only() -> None:
    group, rounds, ranks = make()
    handle, penalties = group.kl_penalties(group.reference_logp(group.recompute_logp(batch(1))), 0.5)
    assert penalties.tolist() == [0.5] * 4
    group.update(group.with_advantages(handle, handle.batch.advantages + 10))
    assert rounds[::2] == ["recompute_logp", "reference_logp", "kl_penalties", "replace_shares", "update"]
    assert ranks[1][-2] == ("update 0", [[1, 2]], [11.0, 12.0], CHUNKS[1])


def test_with_advantages_before_sending_needs_no_call() -> None:
    group, rounds, ranks = make()
    handle = group.recompute_logp(batch(1))
    group.update(group.with_advantages(handle, handle.batch.advantages + 10))
    assert rounds == ["update"] * 2
    assert ranks[1][0] == ("logp", [[1, 2]], [11.0, 12.0], CHUNKS[1])


def test_update_of_a_used_batch_is_rejected() -> None:
    group, _, ranks = make()
    used = group.recompute_logp(batch(2))
    group.update(used)
    with pytest.raises(McoreRLError, match=f"batch {used.key} is not on this rank"):
        group.update(used)
    gone = group.recompute_logp(batch(2))
    held = group.recompute_logp(batch(2))
    with pytest.raises(McoreRLError, match=f"batch {gone.key} is not on this rank, which holds {held.key}"):
        group.reference_logp(gone)
    assert [call[0] for call in ranks[0]] == ["logp", "update 0", "update 1", "gather", "logp", "logp"]


def test_critic_update_uses_the_batch_of_its_values() -> None:
    rounds: list[str] = []
    handles = [Rank(rounds, CriticProcess), Rank(rounds, CriticProcess)]
    for handle in handles:
        handle.process.critic = RecordedCritic()
    critic = CriticGroup(handles, (0, 1), EndedWatch(), RankMap((0, 1), (0, 1)), Stages(), lambda batch: batch)  # type: ignore[arg-type]
    first, second = critic.values(batch(2)), critic.values(batch(1))
    assert critic.update(second, TokenRefs(second.columns, 0)) == {"updated": Mean(2.0, 2)}
    assert handles[0].process.critic.calls == [[[0], [3]], [[0, 3]], ([0, 3], [0, 3])]
    with pytest.raises(McoreRLError, match=f"batch {first.key} is not on this rank"):
        critic.update(first, TokenRefs(first.columns, 0))


class RecordedCritic:
    """Fake MegatronCritic. Records the samples of each call and of the returns."""

    update_epochs = 1

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.memory = SimpleNamespace(offload=lambda: None)

    def values(self, shares: list[RankShare], chunks: list[object]) -> ValuedBatch:
        self.calls.append([share.samples.tolist() for share in shares])
        return ValuedBatch(shares, chunks, {int(s): np.ones(1, np.float32) for share in shares for s in share.samples})

    def update(self, batch: ValuedBatch, index: int, returns: dict[int, np.ndarray]) -> dict[str, object]:
        self.calls.append((batch.shares[index].samples.tolist(), sorted(returns)))
        return {"updated": Mean(1.0, 1)}

    def gather_parameters(self) -> None: ...


def test_create_buffers_frees_those_of_the_earlier_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a connection that failed: otherwise every lost engine would take their memory from the GPU."""
    events: list[str] = []

    class Setup:
        def __init__(self, plan: int, rank: int) -> None:
            self.plan = plan

        def create_buffers(self) -> dict[int, str]:
            events.append(f"create {self.plan}")
            return {}

        def disconnect(self) -> None:
            events.append(f"disconnect {self.plan}")

        def close(self) -> None:
            events.append(f"close {self.plan}")

    monkeypatch.setattr("mcore_rl.weights.connection.TrainerSetup", Setup)
    process: Any = TrainerProcess("rank")
    process.actor = SimpleNamespace(rank=0, require_frozen=lambda plan: None)
    process.disconnect_weights()
    for plan in range(3):  # none of the connections succeeds
        process.create_buffers(plan)
        process.disconnect_weights()
    steps = [[f"create {plan}", f"disconnect {plan}", f"close {plan}"] for plan in range(3)]
    assert events == [event for of_plan in steps for event in of_plan][:-1]
