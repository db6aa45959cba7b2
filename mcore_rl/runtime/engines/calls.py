"""Remote calls to a rollout engine's processes (runtime.engines.process)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mcore_rl.runtime.calls import ProcessCalls, Ref

if TYPE_CHECKING:
    import numpy as np

    from mcore_rl.config.schema import Config
    from mcore_rl.data.transcripts import PromptSource
    from mcore_rl.engines.hosts import EngineHosts
    from mcore_rl.rewards.step_grading import TaskToGrade
    from mcore_rl.rollout.tasks import GivenUp, Until
    from mcore_rl.runtime.engines.process import Report
    from mcore_rl.types import Grades, RolloutScalars, RolloutTask, SavedFile, TrajectoryBuffers
    from mcore_rl.weights.connection import Connection
    from mcore_rl.weights.transports.topology import Endpoint
    from mcore_rl.weights.verify import Comparison


class EngineCalls(ProcessCalls):
    """Calls to an EngineProcess."""

    def setup(
        self,
        config: Config,
        visible_devices: str | None,
        prompts: Mapping[str, Ref[PromptSource]],
        hosts: EngineHosts,
        journal: str | None,
    ) -> Ref[None]:
        return self.handle.setup.remote(config, visible_devices, prompts, hosts, journal)

    def serve(self) -> Ref[None]:
        return self.handle.serve.remote()

    def run(self, tasks: list[tuple[int, RolloutTask]], until: Until, released: list[int]) -> Ref[Report]:
        return self.handle.run.remote(tasks, until, released)

    def begin(self, tasks: list[tuple[int, RolloutTask]]) -> Ref[None]:
        return self.handle.begin.remote(tasks)

    def give_up(self, free: int) -> Ref[GivenUp]:
        return self.handle.give_up.remote(free)

    def num_running(self) -> Ref[tuple[int, int]]:
        return self.handle.num_running.remote()

    def probe(self, task: RolloutTask) -> Ref[tuple[int, RolloutScalars, float]]:
        return self.handle.probe.remote(task)

    def grade(self, tasks: list[TaskToGrade], *trajectories: Ref[TrajectoryBuffers]) -> Ref[list[Grades]]:
        return self.handle.grade.remote(tasks, *trajectories)

    def amend_records(
        self, part: str, rewards: np.ndarray, accuracies: np.ndarray, scores: dict[str, np.ndarray]
    ) -> Ref[None]:
        return self.handle.amend_records.remote(part, rewards, accuracies, scores)

    def cut(self, keys: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> Ref[TrajectoryBuffers]:
        return self.handle.cut.remote(keys, offsets, rows)

    def save_tasks(self, path: str, keys: list[int], request_ids: list[str]) -> Ref[list[SavedFile]]:
        return self.handle.save_tasks.remote(path, keys, request_ids)

    def restore_tasks(self, path: str, request_ids: list[list[str]]) -> Ref[list[int]]:
        return self.handle.restore_tasks.remote(path, request_ids)

    def sleep(self, keep_weights: bool) -> Ref[int]:
        return self.handle.sleep.remote(keep_weights)

    def wake_up(self, part: str) -> Ref[None]:
        return self.handle.wake_up.remote(part)

    def endpoints(self) -> Ref[list[Endpoint]]:
        return self.handle.endpoints.remote()

    def connect(self, connection: Ref[Connection], engine: int) -> Ref[None]:
        return self.handle.connect.remote(connection, engine)

    def receive_update(self, version: int, recompute: bool) -> Ref[list[int]]:
        return self.handle.receive_update.remote(version, recompute)

    def compare_weights(self) -> Ref[list[Comparison]]:
        return self.handle.compare_weights.remote()


class FollowerCalls(ProcessCalls):
    """Calls to a FollowerProcess."""

    def follow(self, config: Config, visible_devices: str | None, hosts: EngineHosts) -> Ref[None]:
        return self.handle.follow.remote(config, visible_devices, hosts)
