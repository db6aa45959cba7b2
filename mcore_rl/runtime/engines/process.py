"""The process of a rollout engine with its grading processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mcore_rl.config.episodes import WITH_GATEWAY
from mcore_rl.config.reward import NO_RULE, STEP
from mcore_rl.config.rules.images import setting_without_images
from mcore_rl.config.rules.rollout import concurrent_episodes, episode_of, has_turns
from mcore_rl.config.schema import Config
from mcore_rl.data.checksum import saved_file
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer, plain_decoder
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.engines.rank_engine import RankEngine
from mcore_rl.engines.registry import engine_class, follower
from mcore_rl.engines.settings import ONE_HOST, EngineHosts, EngineSettings
from mcore_rl.rewards.step_grading import DeferredRewarder, StepGrader
from mcore_rl.rewards.task_parts import TaskPart, TranscriptReader
from mcore_rl.rollout.episodes.single_turn import Player, SingleTurnPlayer
from mcore_rl.rollout.gateway.membership import GatewayMembership
from mcore_rl.rollout.journal import TokenJournal
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.rollout.results import grades_of
from mcore_rl.rollout.streaming.interface import JOURNAL, TRAJECTORIES
from mcore_rl.rollout.tasks import ROOM, GivenUp, RequestCallbacks, TaskRunner, Until
from mcore_rl.rollout.validator import PROBE
from mcore_rl.rollout.worker import RolloutWorker
from mcore_rl.runtime.calls import packed, remote_method
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.trajectory_store import FetchRequest, TrajectoryStore
from mcore_rl.types import (
    DeviceMemory,
    DraftCounts,
    Grades,
    RolloutScalars,
    RolloutTask,
    SavedFile,
    Span,
    TrajectoryBuffers,
)
from mcore_rl.vision.processor import ImageProcessor
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.engine_config import has_vision_tower
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison

MAX_REPLAY_THREADS = 1 << 12
"""Maximum threads in a replay, started on demand. Tasks that ran on another engine in the recorded run may wait here
for their weight version, each in a thread."""
SECONDS_BETWEEN_LOOKS = 0.1
"""Interval between looks at files that are being fetched; each look waits for the end of a step."""


@dataclass(frozen=True)
class EngineReport:
    """Report of an engine to the scheduler."""

    ended: list[tuple[int, int, RolloutScalars]]
    """Number, key of the trajectories, and scalars of each task that finished since the last report."""
    requests_received: int
    """Requests received since the engine started."""
    requests_left: int
    """Requests that have neither ended nor been given up."""
    busy_seconds: float
    """Seconds since the engine started in which it had running requests."""
    tokens_carried_over: int
    """Tokens of responses that were paused for new weights and continued, since the engine started."""
    drafts: DraftCounts | None = None
    """None without rollout.draft."""


@marks_errors
class EngineProcess(RunProcess):
    """One rollout engine with its grading processes. The main thread sets up the engine and then steps it (`serve`).
    All other operations on the engine run in that thread too, between two steps."""

    def __init__(self, name: str, logs: str | None = None, peers: int | None = None) -> None:
        super().__init__(name, logs, peers)
        self._kept = TrajectoryStore(name)
        self._episodes = SpanRecorder(f"{name}, episodes")

    def setup(self, context: SetUpContext, hosts: EngineHosts = ONE_HOST, journal: str | None = None) -> None:
        context.prepare_environment()
        from mcore_rl.rewards.manager import RewardManager

        config = context.config
        with self.spans.span("setup"):
            # Grading processes start in parallel with the engine.
            longest = config.rollout.max_response_tokens
            rewarder = RewardManager(config.reward, max_response_tokens=longest, sandbox=config.sandbox)
            resolved = {name: ray.get(reference) for name, reference in context.prompts.items()}
            tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
            self._step_grader = StepGrader(rewarder, TranscriptReader(resolved, tokenizer, config.rollout.stop))
            engine = build_engine(config, self.name, tokenizer, hosts, load_weights=context.loads_weights)
            self.receiver: RankEngine = engine
            self.loop = EngineLoop(engine, None if journal is None else TokenJournal(Path(journal)))
            images = _image_processor(config, tokenizer, resolved.values())
            self._gateway = GatewayMembership(context.gateways.get(this_host().memory), config.rollout, journal)
            player = _player(config, self.loop, tokenizer, self._episodes.record, images, self._gateway)
            worker = RolloutWorker(
                player,
                DeferredRewarder() if config.reward.batch == STEP else rewarder,
                resolved,
                failed_reward=config.rollout.failed_reward,
                has_rules=config.reward.function != NO_RULE,
                images=images,
            )
            low = concurrent_episodes(config.rollout)
            probe = RolloutWorker(
                SingleTurnPlayer(self.loop, tokenizer), DeferredRewarder(), {PROBE: resolved["train"]}, images=images
            )
            self._probe = probe.run

            def run(task: RolloutTask, progress: RequestCallbacks) -> tuple[TrajectoryBuffers, RolloutScalars] | None:
                return (probe if task.prompt_set == PROBE else worker).run(task, progress)

            # An engine is given at most as many tasks (LoadBalancer), so no task waits for a thread.
            threads = ROOM * low if config.rollout.replay_schedule is None else MAX_REPLAY_THREADS
            self._runner = TaskRunner(run, player.withdraw, num_threads=threads, low=low)
            rewarder.wait_ready()
            if engine.can_generate:  # it has loaded its weights
                self._gateway.admit(can_generate=True)

    def serve(self) -> None:
        """Step the engine forever; called once, after `setup`. If `setup` failed, wait: its error is reported."""
        if not hasattr(self, "loop"):
            threading.Event().wait()
        self.loop.serve()

    @remote_method(concurrency_group="run")
    @packed
    def run(self, tasks: list[tuple[int, RolloutTask]], until: Until, released: list[int]) -> EngineReport:
        """Start `tasks` and wait (TaskRunner.exchange). Trajectories, and their requests in the journal, are kept until
        a later call has their keys in `released`."""
        # The driver has dropped its last reference to these trajectories, so neither readers nor other engines need
        # them.
        self.loop.release(self._kept.release(released))
        with self.spans.span(f"generate {tasks[0][1].prompt_set}" if tasks else "generate"):
            finished, received, left = self._runner.exchange(tasks, until)
        ended = [(task.number, self._kept.keep(task.buffers, task.request_ids), task.scalars) for task in finished]
        drafts = self.receiver.draft_counts
        return EngineReport(ended, received, left, self.loop.busy_seconds, self.loop.tokens_carried_over, drafts)

    @remote_method(concurrency_group="engine")
    @packed
    def begin(self, tasks: list[tuple[int, RolloutTask]]) -> None:
        """Start tasks without waiting (TaskRunner.begin); called while `run` waits."""
        self._runner.begin(tasks)

    @remote_method(concurrency_group="engine")
    def probe(self, task: RolloutTask) -> tuple[int, RolloutScalars, float]:
        """Run a task of rollout.validator.probe_task concurrently with other tasks. Returns the key of its
        trajectories, its scalars, and the engine's busy seconds."""
        with self.spans.span("probe"):
            made = self._probe(task)
        assert made is not None, "probes are not withdrawn"
        buffers, scalars = made
        return self._kept.keep(buffers, task.request_ids), scalars, self.loop.busy_seconds

    @remote_method(concurrency_group="engine")
    def give_up(self, free: int) -> GivenUp:
        """Withdraw unstarted requests (TaskRunner.give_up)."""
        with self.spans.span("give up requests"):
            return self._runner.give_up(free)

    @remote_method(concurrency_group="engine")
    def num_running(self) -> tuple[int, int]:
        """Return the numbers of unfinished tasks, and of their requests that neither ended nor wait for weights."""
        tasks, requests = self._runner.num_left
        return tasks, requests - self.loop.num_paused

    @remote_method(concurrency_group="watch")
    def num_ended(self) -> dict[int, int]:
        """Return the numbers of ended responses of the unfinished tasks, by the numbers of the tasks."""
        return self._runner.num_ended if hasattr(self, "_runner") else {}

    @remote_method(concurrency_group="watch")
    def seconds_stuck(self) -> float:
        return self.loop.seconds_stuck if hasattr(self, "loop") else 0.0

    @remote_method(concurrency_group="cut")
    def cut(self, keys: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> TrajectoryBuffers:
        """Select rows (TrajectoryStore.cut); works while the engine generates."""
        return self._kept.cut(keys, offsets, rows)

    @remote_method(concurrency_group="cut")
    def save_tasks(self, path: str, keys: list[int], request_ids: list[str]) -> list[SavedFile]:
        """Write the trajectories under `keys`, and the sampled tokens of their requests and of running ones, to files
        whose names begin with `path`. Returns the files written."""
        from mcore_rl.rollout.streaming.checkpoint import write_trajectories

        with self.spans.span("save tasks"):
            trajectories, journal, files = Path(f"{path}{TRAJECTORIES}"), Path(f"{path}{JOURNAL}"), []
            if keys:
                files.append(write_trajectories(trajectories, [self._kept.all_of(key) for key in keys]))
            sampled = [*request_ids, *self._kept.request_ids(keys)]
            if sampled and self.loop.copy_journal(journal, sampled):
                files.append(saved_file(journal.parent, journal.name))
            return files

    @remote_method(concurrency_group="cut")
    def restore_tasks(self, path: str, request_ids: list[list[str]]) -> list[int]:
        """Keep the trajectories of a file, one entry of `request_ids` per task. Returns their keys."""
        from mcore_rl.rollout.streaming.checkpoint import read_sampled, read_trajectories

        with self.spans.span("restore tasks"):
            # If this engine is lost, the weights that sampled these responses no longer exist.
            self.loop.take_over(read_sampled(Path(path), request_ids)).result()
            parts = zip(read_trajectories(Path(path)), request_ids, strict=True)
            return [self._kept.keep(part, ids) for part, ids in parts]

    @remote_method(concurrency_group="cut")
    def amend_records(
        self, part: str, rewards: np.ndarray, accuracies: np.ndarray, scores: dict[str, np.ndarray]
    ) -> None:
        from mcore_rl.data.records import amend_part

        with self.spans.span("amend records"):
            amend_part(part, rewards, accuracies, scores)

    @remote_method(concurrency_group="engine", num_returns=2)
    def fetch(self, wanted: FetchRequest) -> tuple[None, TrajectoryBuffers]:
        """Override RunProcess.fetch to run outside of the main thread, which steps the engine."""
        return self.fetched(wanted)

    @remote_method(concurrency_group="engine")
    def grade(self, parts: list[TaskPart], trajectories: TrajectoryBuffers) -> list[Grades]:
        """Grade fetched trajectories; see StepGrader.grade."""
        with self.spans.span("grade step"):
            return [grades_of(scores) for scores in self._step_grader.grade(parts, trajectories)]

    @remote_method(concurrency_group="engine")
    def sleep(self, keep_weights: bool) -> int:
        self._gateway.sleep()
        with self.spans.span("sleep"):
            return self.loop.between_steps(lambda: self.loop.engine.sleep(keep_weights=keep_weights))

    @remote_method(concurrency_group="engine")
    def wake_up(self, part: str) -> None:
        with self.spans.span(f"wake up {part}"):
            self.loop.between_steps(lambda: self.loop.engine.wake_up(part))
        self._gateway.update(can_generate=self.receiver.can_generate)

    @remote_method(concurrency_group="engine")
    def device_memory(self) -> list[DeviceMemory | None]:
        return self.loop.between_steps(self.receiver.device_memory)

    @remote_method(concurrency_group="engine")
    def endpoints(self) -> list[Endpoint]:
        return self.loop.between_steps(self.receiver.endpoints)

    @remote_method(concurrency_group="engine")
    def connect(self, connection: Connection, engine: int) -> None:
        with self.spans.span("connect weights"):
            self.loop.between_steps(lambda: self.receiver.connect(connection, engine))
        self._num_rounds = connection.plan.num_rounds

    @remote_method(concurrency_group="engine")
    def disconnect(self) -> None:
        with self.spans.span("disconnect weights"):
            self.loop.between_steps(self.receiver.disconnect)

    @remote_method(concurrency_group="engine")
    def fetch_update(self, first_round: int) -> None:
        """Fetch the files of the next update while the engine generates; returns when its ranks have them in memory."""
        with self.spans.span("fetch weights"):
            self.loop.between_steps(lambda: self.receiver.fetch_update(first_round))
            while not self.loop.between_steps(self.receiver.is_fetched):
                time.sleep(SECONDS_BETWEEN_LOOKS)

    @remote_method(concurrency_group="engine")
    def receive_update(self, version: int, recompute: bool, first_round: int) -> list[int]:
        """Receive an update whose first round is `first_round`, and make it visible. Returns the received bytes of each
        rank. Running requests continue as described in RankEngine.finish_update."""
        return self.loop.between_steps(lambda: self._receive_update(version, recompute, first_round))

    def _receive_update(self, version: int, recompute: bool, first_round: int) -> list[int]:
        self.receiver.begin_update(first_round)
        received = []
        for sync_round in range(first_round, self._num_rounds):
            with self.spans.span("receive bucket"):
                received.append(self.receiver.receive_bucket(sync_round))
        with self.spans.span("finish weight update"):
            self.receiver.finish_update(version, recompute=recompute)
        # Bytes of each rank of the engine, summed over the rounds.
        return [sum(of_rank) for of_rank in zip(*received, strict=True)]

    @remote_method(concurrency_group="engine")
    def compare_weights(self) -> list[Comparison]:
        with self.spans.span("compare weights"):
            return self.loop.between_steps(self.receiver.compare)

    @remote_method(concurrency_group="engine")
    def join_gateway(self) -> None:
        """Answer requests of the host's gateway from now on; called once, after the first weights are checked."""
        self._gateway.admit(can_generate=self.receiver.can_generate)

    @remote_method(concurrency_group="engine")
    def drain_spans(self) -> list[Span]:
        return self.spans.drain() + self._episodes.drain()


@marks_errors
class FollowerProcess(RunProcess):
    """Ranks of a rollout engine on another host than its EngineProcess."""

    def follow(self, context: SetUpContext, hosts: EngineHosts) -> None:
        """Run the ranks; returns when they end."""
        context.prepare_environment()
        settings = _settings(context.config, hosts, load_weights=context.loads_weights)
        follower(context.config.rollout.engine)(settings)


# Threads per group. `watch` occupies one of its threads for the whole run, and `run` one until responses end. Readers
# wait for `cut`, so it has a thread of its own too: operations in "engine" may wait for a step or for other processes.
ENGINE_GROUPS = {"watch": 2, "cut": 1, "run": 1, "engine": 2}
EngineActor = ray.remote(concurrency_groups=ENGINE_GROUPS, max_restarts=0)(EngineProcess)
FollowerActor = ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)(FollowerProcess)


def _image_processor(config: Config, tokenizer: Any, sources: Iterable[PromptSource]) -> ImageProcessor | None:
    """Return the image processor if any prompt has images, or if tools or programs may give some to a model that reads
    images."""
    rollout = config.rollout
    may_add = rollout.tools is not None or episode_of(rollout) in WITH_GATEWAY
    if not any(isinstance(source, PromptSet) and source.has_images for source in sources) and not (
        may_add and has_vision_tower(config.model.hf_path)
    ):
        return None
    return ImageProcessor.load(config.model.hf_path, tokenizer, "model.hf_path")


def _player(
    config: Config,
    loop: EngineLoop,
    tokenizer: Any,
    record: Callable[[str, float, float], None],
    images: ImageProcessor | None,
    gateway: GatewayMembership,
) -> Player:
    """Create the player of single turns, or of episodes with their tools."""
    if not has_turns(config.rollout):
        return SingleTurnPlayer(loop, tokenizer)
    from mcore_rl.rollout.episodes.load import start_episodes

    return start_episodes(
        config.rollout,
        config.sandbox,
        loop,
        tokenizer,
        eos_token_ids(tokenizer, config.model.hf_path),
        template_kwargs=config.data.template_kwargs,
        record=record,
        images=images,
        without_images=setting_without_images(config),
        gateway=gateway,
    )


def build_engine(
    config: Config, name: str, tokenizer: Any, hosts: EngineHosts = ONE_HOST, *, load_weights: bool = False
) -> RankEngine:
    """Build an engine for model.hf_path. Without `load_weights`, its weights are random until the first publish, which
    delivers every tensor. `name` is the name of the process in messages."""
    settings = _settings(config, hosts, load_weights=load_weights)
    stops, decode = eos_token_ids(tokenizer, config.model.hf_path), plain_decoder(tokenizer)
    settings = replace(settings, name=name, eos_token_ids=stops, decode=decode, tokenizer=tokenizer)
    return engine_class(config.rollout.engine)(settings)


def _settings(config: Config, hosts: EngineHosts, *, load_weights: bool) -> EngineSettings:
    """Return the settings that are equal on all hosts of an engine."""
    return EngineSettings(
        config.model.hf_path,
        config.rollout,
        dtype=config.model.dtype,
        seed=config.run.seed,
        timeout_seconds=config.cluster.collective_timeout_seconds,
        load_weights=load_weights,
        capture_routing=config.actor.moe.router_replay == "engine",
        float32_head=config.model.float32_head,
        float32_router=config.model.float32_router,
        hosts=hosts,
    )
