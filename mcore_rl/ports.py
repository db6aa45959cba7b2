"""Protocols: all that the trainer and the rollout know of engines, graders, actors and publishers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import numpy as np

from mcore_rl.types import (
    Batch,
    BatchHandle,
    Completion,
    Delta,
    GenerationRequest,
    Groups,
    LogpGap,
    Metric,
    Prompt,
    RolloutResult,
    RolloutScalars,
    RolloutTask,
    SavedFile,
    SavedState,
    Score,
    TokenRefs,
)


class Engine(Protocol):
    """An inference engine in this process, which steps it. Token ids in; ids, processed log-probabilities, finish
    reason and weight versions out.

    A response is a function of its prompt, its seed and the tokens before which weights changed, and of nothing else:
    not of what else runs, in which order it came, or whether it was aborted and went on later.
    """

    @property
    def weight_version(self) -> int: ...

    @property
    def num_running(self) -> int:
        """Requests that were submitted and have neither ended nor been aborted."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Takes requests, in this order, which begin with a later step.

        Raises: DataError, ConfigError for a request that cannot be generated, and takes none then; WeightSyncError
        while the engine holds a part of an update.
        """

    def step(self) -> tuple[list[Delta], list[Completion]]:
        """One pass of what runs: what it adds to responses, and those that it ends; nothing where nothing runs.

        Raises: WeightSyncError as `submit`; WorkerDiedError.
        """

    def abort(self, request_ids: Collection[str]) -> list[Completion]:
        """Ends requests, with what there is of their responses; they may be submitted again with it. Where experts are
        kept, a response comes only as far as they do. Those that have ended already are passed over."""

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None:
        """Submits all and steps until they have ended; calls on_finish once per request, in the order they finish.
        Nothing else may run.

        Raises: as `submit` and `step`; what on_finish raises, and none of them runs then.
        """

    def sleep(self, *, keep_weights: bool) -> int:
        """Gives device memory back, as much as the engine can: the KV cache, and weights, which keep_weights moves
        to host memory and not keep_weights may discard. Returns the bytes freed.

        Nothing may run. Asleep it must not generate; an update needs the weights awake. Sleeping twice does nothing
        more.
        """

    def wake_up(self, part: str) -> None:
        """Takes memory back for "weights" or "kv_cache". Discarded weights are undefined until an update."""

    def shutdown(self) -> None: ...


Endpoint = TypeVar("Endpoint")
"""Where a rank is (weights.transports.topology.Endpoint)."""
Connection_contra = TypeVar("Connection_contra", contravariant=True)
"""What the processes of a sync are told to come together (weights.connection.Connection)."""
Comparison = TypeVar("Comparison")
"""What a rank finds of its weights (weights.verify.Comparison)."""


class WeightReceiver(Protocol[Endpoint, Connection_contra, Comparison]):
    """Takes updates of an engine's weights, turn after turn, whatever brings them. Lists are by rank of the engine."""

    def endpoints(self) -> list[Endpoint]:
        """Where the engine's ranks take weights."""

    def connect(self, connection: Connection_contra, engine: int, /) -> None:
        """Joins the sync as its engine number `engine`, before the first update, or again after one that broke.
        Collective over all processes of the sync.

        Raises: PeerLostError; WeightSyncError where the engine takes other tensors than are planned.
        """

    def begin_update(self) -> None:
        """Begins an update. One that was begun and not finished is discarded."""

    def receive_bucket(self, turn: int) -> list[int]:
        """Loads what comes at a turn of the plan, in their order; returns its bytes as the acknowledgement.

        Raises: PeerLostError, WeightSyncError; until the next update is whole, the engine must not generate.
        """

    def finish_update(self, version: int, *, recompute: bool = False) -> None:
        """Makes the update visible: weight_version is `version`, and nothing that was computed with earlier weights is
        used for a request that begins after it. Responses that have begun go on with what they have of the KV cache, or
        with `recompute` compute it anew.

        Raises: WeightSyncError when something of the model did not come.
        """

    def compare(self) -> list[Comparison]:
        """What the engine computes with against what trainer ranks, which send digests meanwhile, say of it."""


class Rewarder(Protocol):
    """Grades responses outside the calling process; a grader that raises or hangs yields Score.error. Any thread may
    call it."""

    def submit(
        self,
        key: int,
        prompt: Prompt,
        response_text: str,
        response_tokens: int,
        *,
        group: Collection[int] = (),
        task: Collection[int] = (),
    ) -> None:
        """Starts grading under a key of its own; returns at once. group, task: keys of the responses to the same prompt
        and of the whole task, its own among them, for graders that see them together."""

    def withdraw(self, key: int, *, group: Collection[int] = (), task: Collection[int] = ()) -> None:
        """Says that a response will be neither submitted nor collected, so that nothing waits for it."""

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        """Waits for the scores of `keys`, which were submitted; by key. Others may be waited for meanwhile."""

    def shutdown(self) -> None: ...


class ResponseScorer(Protocol):
    """A model that scores responses, on processes of its own."""

    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Scores of all responses of each task.

        Shapes: float32 [B] per task.
        Raises: NonFiniteError naming the response.
        """


class Collector(Protocol):
    """Generates, scores, filters and refills one step's groups."""

    def collect(self, step: int) -> Groups:
        """The groups of one step."""


class PendingSave(Protocol):
    """A checkpoint that is being written."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""

    def result(self) -> SavedState:
        """Waits until every rank has written.

        Raises: what a rank raised: OSError made a ConfigError when the disk is full; CheckpointError.
        """


class Actor(Protocol):
    """The policy under training, spread over ranks."""

    def recompute_logp(self, batch: Batch) -> BatchHandle:
        """What the updates need of the current policy's log-probabilities, found before the first of them. What is
        found stays on the ranks; the handle is what later calls take."""

    def compare_logp(self, batch: Batch) -> list[LogpGap]:
        """Differences between the current policy's log-probabilities and those that came with the batch, update by
        update. Nothing stays on the ranks."""

    def reference_logp(self, handle: BatchHandle) -> BatchHandle:
        """Log-probabilities of the reference for the batch, before its updates; they stay on the ranks."""

    def kl_penalties(self, handle: BatchHandle, coefficient: float) -> tuple[BatchHandle, np.ndarray]:
        """The KL between policy and reference times `coefficient`, of a batch from `reference_logp`. Token by token it
        stays where it is, for `estimate`; here metrics (reward/kl), and its sum over each response, float32 [B]."""

    def with_advantages(self, handle: BatchHandle, advantages: np.ndarray) -> BatchHandle:
        """The batch with other advantages, [B], and all that was found of it."""

    def refresh_reference(self) -> None:
        """The reference takes the policy's present weights."""

    def estimate(self, handle: BatchHandle, values: TokenRefs | None) -> tuple[BatchHandle, TokenRefs]:
        """Advantages token by token where the tokens are, for the batch's updates; `values` are what Critic.values
        returned. Returns the returns too, for Critic.update."""

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        """One optimizer step per entry of the batch's updates; the handle names nothing afterwards.

        Raises: NonFiniteError before a non-finite step.
        """

    def start_save(self, directory: str, *, snapshot: bool) -> PendingSave:
        """Begins to write parameters, optimizer, schedule and random state into an existing directory. With `snapshot`
        updates may follow before it has finished, and do not show; else nothing may be called before its result."""

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        """Restores what was saved, in whatever layout, after comparing `files` with their checksums.

        Raises: DamagedCheckpointError; CheckpointError when it does not fit the model.
        """

    def export_hf(self, directory: str, source: str) -> None:
        """Writes the weights as an HF directory, with configuration and tokenizer copied from `source`."""

    def export_adapter(self, directory: str, source: str) -> None:
        """Writes the adapters of a LoRA run in PEFT's format; `source` is the model under them."""


class Critic(Protocol):
    """The value model, spread over ranks of its own."""

    def values(self, batch: Batch) -> TokenRefs:
        """Values of every trained token; they stay in the object store."""

    def update(self, values: TokenRefs, returns: TokenRefs) -> dict[str, Metric]:
        """One optimizer step per update of the batch that `values` are of, towards what Actor.estimate returned.

        Raises: NonFiniteError before a non-finite step.
        """

    def start_save(self, directory: str, *, snapshot: bool) -> PendingSave:
        """As Actor.start_save."""

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        """As Actor.load."""


class Publisher(Protocol):
    """Hands the actor's weights to every engine."""

    def publish(self, version: int) -> int:
        """Returns `version` when every engine has acknowledged every bucket.

        Raises: WeightSyncError.
        """

    def verify(self) -> int:
        """Compares what engines hold with what the actor holds, tensor by tensor; returns tensors compared.

        Raises: WeightSyncError listing the tensors that differ.
        """


class EngineProbe(Protocol):
    """Short responses of each engine to training prompts, outside of training."""

    def probe(self, num_prompts: int) -> dict[str, RolloutResult]:
        """One ungraded response to each of `num_prompts` prompts from every engine, by the engine's name. No group id
        comes twice."""


class Validator(Protocol):
    """Responses to the validation prompts, graded."""

    def validate(self, step: int) -> RolloutScalars: ...
