"""The bodies of the run's processes, as Ray actors: one trainer rank, one rollout engine with its graders.

Construction does nothing; `setup` does, so that what goes wrong there comes back as the typed error it was.
`watch` runs in a concurrency group of its own and never returns: its failing is how a death is noticed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import ray

from mcore_rl.config.schema import Config
from mcore_rl.errors import McoreRLError
from mcore_rl.ports import WeightReceiver
from mcore_rl.runtime.hosts import Host, this_host
from mcore_rl.runtime.output import write_output_to
from mcore_rl.runtime.ports import free_port
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.types import (
    Metric,
    RankShare,
    RolloutScalars,
    RolloutTask,
    SavedFile,
    SavedState,
    Span,
    TokenColumn,
    TrajectoryBuffers,
)

if TYPE_CHECKING:
    from mcore_rl.megatron.rank_batch import RankBatch, ValuedBatch
    from mcore_rl.weights.buckets import BucketSpec

T = TypeVar("T")


def see_only(devices: tuple[int, ...] | None) -> None:
    """Hides the node's other GPUs from this process, before torch is imported in it; None: Ray has done so."""
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))


class Held(Generic[T]):
    """The one batch that a rank keeps between calls, under the key that the driver gave it."""

    def __init__(self) -> None:
        self._key: int | None = None
        self._batch: T | None = None

    def keep(self, key: int, batch: T) -> None:
        """In the place of what was there."""
        self._key, self._batch = key, batch

    def of(self, key: int) -> T:
        """Raises: McoreRLError for the key of a batch that is not here (any more)."""
        if self._batch is None or key != self._key:
            raise McoreRLError(f"batch {key} is not on this rank, which holds {self._key or 'none'}")
        return self._batch

    def take(self, key: int) -> T:
        """As `of`; nothing is here afterwards."""
        batch = self.of(key)
        self._key = self._batch = None
        return batch


class RunProcess:
    """What all processes have in common."""

    def __init__(self, name: str, logs: str | None = None) -> None:
        """What the process writes goes to a file of its name in the directory `logs`; None: where Ray puts it."""
        if logs is not None:
            write_output_to(Path(logs), name)
        self.name = name
        self.spans = SpanRecorder(name)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def where(self) -> tuple[Host, int]:
        """Host and process id."""
        return this_host(), os.getpid()

    def drain_spans(self) -> list[Span]:
        return self.spans.drain()


class RankProcess(RunProcess):
    """One rank of a process group."""

    def free_address(self) -> str:
        """tcp://host:port that the other ranks can reach; the port was free a moment ago."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"


class TrainedRankProcess(RankProcess):
    """One rank of a model that is trained: what actor and critic have in common. `role` is the rank."""

    role: Any

    def offload(self, parts: tuple[str, ...]) -> int:
        """Returns the bytes of this rank that are away."""
        return int(self.role.trained.memory.offload(parts))

    def plan_save(self, directory: str, snapshot: bool) -> None:
        """What the two calls after it write."""
        from mcore_rl.megatron.checkpoint_writer import CheckpointWriter

        with self.spans.span("plan save"):
            self._save = CheckpointWriter(directory, self.role, snapshot=snapshot)

    @ray.method(concurrency_group="save")
    def write_save(self) -> Any:
        """In a thread of its own, while the main one trains."""
        with self.spans.span("write save"):
            return self._save.write()

    @ray.method(concurrency_group="save")
    def finish_save(self, *reports: Any) -> SavedState:
        """Rank 0 only; `reports` are those of all ranks. Fails as a rank's write_save did, if any did."""
        with self.spans.span("finish save"):
            return self._save.finish(reports)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        from mcore_rl.megatron.checkpoint import load_checkpoint

        with self.spans.span("load"):
            load_checkpoint(directory, self.role, files)


@ray.remote(concurrency_groups={"watch": 2, "save": 1}, max_restarts=0)
class TrainerProcess(TrainedRankProcess):
    """One rank of the actor (policy)."""

    def __init__(self, name: str, logs: str | None = None) -> None:
        super().__init__(name, logs)
        self._held: Held[RankBatch] = Held()

    def setup(self, config: Config, rank: int, world_size: int, init_method: str) -> None:
        from mcore_rl.megatron.actor import MegatronActor

        with self.spans.span("setup"):
            self.actor = self.role = MegatronActor(config, rank, world_size, init_method)
        self.actor.memory.span = self.spans.span

    def compare(self, shares: list[RankShare], *chunks: TrajectoryBuffers) -> dict[str, Metric]:
        return self.actor.compare(shares[0], chunks)

    def recompute_logp(self, key: int, shares: list[RankShare], *chunks: TrajectoryBuffers) -> dict[str, Metric]:
        """Of a batch that is kept, under `key`, for the calls that follow up to its update. Its trajectories lie in the
        object store until then."""
        with self.spans.span("recompute logp"):
            batch, metrics = self.actor.recompute_logp(shares, list(chunks))
        self._held.keep(key, batch)
        return metrics

    def replace_shares(self, key: int, shares: list[RankShare]) -> None:
        """Other numbers of the same samples."""
        self._held.keep(key, replace(self._held.of(key), shares=shares))

    def reference_logp(self, key: int) -> None:
        with self.spans.span("reference logp"):
            self._held.keep(key, self.actor.reference_logp(self._held.of(key)))

    def kl_penalties(self, key: int, coefficient: float) -> tuple[dict[str, Metric], dict[int, float]]:
        """Metrics, and on ranks of the last stage what is taken off the reward of each sample of the share."""
        with self.spans.span("kl penalties"):
            batch, metrics = self.actor.kl_penalties(self._held.of(key), coefficient)
        self._held.keep(key, batch)
        return metrics, {sample: float(own.sum(dtype=np.float64)) for sample, own in batch.penalties.items()}

    def refresh_reference(self) -> None:
        with self.spans.span("refresh reference"):
            self.actor.refresh_reference()

    def offload(self, parts: tuple[str, ...]) -> int:
        away = super().offload(parts)
        if self.actor.reference is not None and "params" in parts:  # a checkpoint may have brought it back
            self.actor.reference.memory.offload()
        return away

    @ray.method(num_returns=2)
    def estimate(self, key: int, *values: TokenColumn) -> tuple[dict[str, Metric], TokenColumn]:
        """Metrics, and the returns of the share, on ranks of the last stage."""
        with self.spans.span("estimate"):
            by_sample = joined(values) if self.actor.estimator.needs.values else None
            batch, metrics, returns = self.actor.estimate(self._held.of(key), by_sample)
        self._held.keep(key, batch)
        return metrics, TokenColumn.of(returns)

    def update(self, key: int, *brought: Any) -> list[dict[str, Metric]]:
        """Trains on the batch and lets it go; one that is brought with the call (as `recompute_logp` takes it) goes
        through that first. Metrics of that, and of every update."""
        reports = [self.recompute_logp(key, *brought)] if brought else []
        batch = self._held.take(key)
        for index in range(len(batch.shares)):
            with self.spans.span("update"):
                reports.append(self.actor.update(batch, index))
        self.actor.gather_parameters()  # weights are read rank by rank from here on
        return reports

    def sync_plan(self, bucket_bytes: int, num_slots: int) -> BucketSpec:
        """The bucket plan of what engines load of this model and layout; the same on every rank."""
        from mcore_rl.weights.buckets import plan_buckets

        self._plans = self.actor.sync_plan()
        return plan_buckets(self._plans, bucket_bytes, num_slots)

    def attach_buckets(self, spec: BucketSpec) -> list[int]:
        """Maps the shared segment; returns the buckets that this rank writes to."""
        from mcore_rl.weights.buckets import SharedBuckets
        from mcore_rl.weights.publish import BucketWriter

        self._buckets = SharedBuckets.attach(spec)
        self._writer = BucketWriter(spec, self._buckets, self._plans, self.actor.rank)
        return [index for index in range(spec.num_buckets) if self._writer.writes_to(index)]

    def write_bucket(self, index: int) -> int:
        with self.spans.span("write bucket"):
            return self._writer.write(index, self.actor.tensors())

    def digest_bucket(self, index: int) -> None:
        from mcore_rl.weights.verify import BucketDigests

        with self.spans.span("digest"):
            if index == 0:
                self._digests = BucketDigests(self._buckets)
            self._digests.add(index)

    def bucket_digests(self) -> dict[str, str]:
        return self._digests.result()

    def export_hf(self, directory: str, source: str) -> None:
        """Collective over all ranks."""
        from mcore_rl.megatron.export import export_hf

        with self.spans.span("export"):
            export_hf(self.actor, directory, source)

    def export_adapter(self, directory: str, source: str) -> None:
        """Collective over all ranks."""
        from mcore_rl.megatron.lora.export import export_adapter

        with self.spans.span("export"):
            export_adapter(self.actor, directory, source)


@ray.remote(concurrency_groups={"watch": 2, "save": 1}, max_restarts=0)
class CriticProcess(TrainedRankProcess):
    """One rank of the critic."""

    def __init__(self, name: str, logs: str | None = None) -> None:
        super().__init__(name, logs)
        self._held: Held[ValuedBatch] = Held()

    def setup(
        self, config: Config, rank: int, world_size: int, init_method: str, visible_devices: tuple[int, ...] | None
    ) -> None:
        see_only(visible_devices)
        from mcore_rl.megatron.critic import MegatronCritic

        with self.spans.span("setup"):
            self.critic = self.role = MegatronCritic(config, rank, world_size, init_method)
        self.critic.trained.memory.span = self.spans.span
        self.critic.trained.memory.offload()

    @ray.method(num_returns=2)
    def values(self, key: int, shares: list[RankShare], *chunks: TrajectoryBuffers) -> tuple[None, TokenColumn]:
        """Nothing, which says that it is done, and the values of the share, on ranks of the last stage; keeps the batch
        under `key` for the `update` after it."""
        with self.spans.span("values"):
            batch = self.critic.values(shares, list(chunks))
        self._held.keep(key, batch)
        self.critic.trained.memory.offload()
        return None, TokenColumn.of(batch.values)

    def update(self, key: int, *returns: TokenColumn) -> list[dict[str, Metric]]:
        """`returns` have those of all samples of this rank's share."""
        batch, by_sample, reports = self._held.take(key), joined(returns), []
        for index in [*range(len(batch.shares))] * self.critic.update_epochs:
            with self.spans.span("update"):
                reports.append(self.critic.update(batch, index, by_sample))
        self.critic.gather_parameters()
        self.critic.trained.memory.offload()
        return reports


def joined(columns: Sequence[TokenColumn]) -> dict[int, Any]:
    """Arrays by sample, of several columns."""
    return {sample: values for column in columns for sample, values in column.by_sample().items()}


@ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)
class EngineProcess(RunProcess):
    """One rollout engine with its grading processes."""

    def setup(
        self,
        config: Config,
        visible_devices: tuple[int, ...] | None,
        prompts: dict[str, Any],
    ) -> None:
        see_only(visible_devices)
        from mcore_rl.rewards.manager import RewardManager
        from mcore_rl.rollout.building import build_worker

        with self.spans.span("setup"):
            # Grading processes start while the engine does.
            rewarder = RewardManager(config.reward, max_response_tokens=config.rollout.max_response_tokens)
            resolved = {name: ray.get(reference) for name, reference in prompts.items()}
            self.worker, self.receiver = build_worker(config, self.name, rewarder, resolved)
            rewarder.wait_ready()

    @ray.method(num_returns=2)
    def run(self, task: RolloutTask) -> tuple[TrajectoryBuffers, RolloutScalars]:
        with self.spans.span(f"generate {task.prompt_set}"):
            return self.worker.run(task)

    def amend_records(
        self, part: str, rewards: np.ndarray, accuracies: np.ndarray, scores: dict[str, np.ndarray]
    ) -> None:
        from mcore_rl.rollout.records import amend_part

        with self.spans.span("amend records"):
            amend_part(part, rewards, accuracies, scores)

    def sleep(self, keep_weights: bool) -> int:
        with self.spans.span("sleep"):
            return self.worker.engine.sleep(keep_weights=keep_weights)

    def wake_up(self, part: str) -> None:
        with self.spans.span(f"wake up {part}"):
            self.worker.engine.wake_up(part)

    def attach(self, arrival: BucketSpec) -> None:
        self.receiver.attach(arrival)

    def begin_update(self) -> None:
        self.receiver.begin_update()

    def receive_bucket(self, index: int) -> int:
        with self.spans.span("receive bucket"):
            return self.receiver.receive_bucket(index)

    def finish_update(self, version: int) -> None:
        with self.spans.span("finish weight update"):
            self.receiver.finish_update(version)

    def checksums(self) -> dict[str, str]:
        with self.spans.span("digest"):
            return self.receiver.checksums()


if TYPE_CHECKING:
    _port: type[WeightReceiver[BucketSpec]] = EngineProcess
