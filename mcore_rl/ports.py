"""Protocols through which the trainer and the rollout use engines, graders, actors and publishers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from mcore_rl.types import (
    Batch,
    BatchHandle,
    Completion,
    Delta,
    GenerationRequest,
    Groups,
    JsonFormat,
    LogpGap,
    Metric,
    Prompt,
    RolloutResult,
    RolloutScalars,
    RolloutTask,
    SavedFile,
    SavedState,
    Score,
    ScoreRefs,
    SequenceLogp,
    TokenRefs,
    TokenScores,
    TokenSequence,
)


class Engine(Protocol):
    """Inference engine in this process; the caller steps it. Input: token ids. Output: token ids, log-probabilities
    after temperature and truncation, the finish reason, and the weight version of each token.

    A response depends only on its prompt, its seed and the token positions at which the weights changed. It does not
    depend on other running requests, on the order of submission, or on an abort after which it was resumed.
    """

    @property
    def weight_version(self) -> int: ...

    @property
    def weights_complete(self) -> bool:
        """False before the first update, and while an update is incomplete; then no step is possible."""

    @property
    def num_running(self) -> int:
        """Number of submitted requests that have neither finished nor been aborted."""

    def prepare_format(self, form: JsonFormat) -> None:
        """Compile a format before requests with it are submitted. May be called from any thread, also during a step.

        Raises: DataError if the engine cannot enforce it, or not compile it in time.
        """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests in this order; they start with the next step.

        Raises: DataError or ConfigError if a request cannot be generated (then none is added).
        """

    def step(self, limit: int = 1, max_tokens: float = math.inf) -> tuple[list[Delta], list[Completion]]:
        """Run one engine step, or up to `limit` steps until a request finishes. A step adds at most one token to a
        request, and more with rollout.draft. No request gets more than `max_tokens` (at least 1). Returns new tokens
        and finished requests; both are empty if nothing is running.

        Raises: WeightSyncError while a weight update is incomplete; WorkerDiedError.
        """

    def abort(self, request_ids: Collection[str]) -> list[Completion]:
        """Stop requests and return their partial responses, with which they can be submitted again. Finished requests
        are ignored.

        If the engine records routed experts, a partial response is cut to the tokens whose experts are known.
        """

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None:
        """Submit all requests, step until they have finished, and call on_finish once per request in the order of
        completion. Nothing else may be running.

        Raises: the errors of `submit` and `step`; errors of on_finish, after aborting the remaining requests.
        """

    def sleep(self, *, keep_weights: bool) -> int:
        """Release as much device memory as the engine can: the KV cache and the weights. The weights move to host
        memory if keep_weights is set; otherwise they may be discarded. Returns the number of bytes freed.

        Nothing may be running. A sleeping engine cannot generate; wake the weights up before a weight update.
        Calling it on a sleeping engine has no effect.
        """

    def wake_up(self, part: str) -> None:
        """Restore the "weights" or the "kv_cache" to device memory. Discarded weights are undefined until the next
        update."""

    def shutdown(self) -> None: ...


class TokenScorer(Protocol):
    """Language model that computes the log-probabilities of given tokens."""

    def score(self, sequences: Sequence[TokenSequence], top_k: int) -> list[TokenScores]:
        """Return the scores of each sequence's tokens from its `start`, with the `top_k` most probable tokens.

        Raises: TeacherError if a server does not answer; WorkerDiedError.
        """


class Rewarder(Protocol):
    """Grader of responses that runs outside the calling process. If a grader raises or hangs, Score.error is set.
    Thread-safe."""

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
        """Start grading one response under a unique key, and return at once.

        group, task: keys of all responses to the same prompt and of the whole task, including this one, for graders
        that compare responses.
        """

    def withdraw(self, key: int, *, group: Collection[int] = (), task: Collection[int] = ()) -> None:
        """Announce that a response will be neither submitted nor collected, so that its group does not wait for it."""

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        """Block until the submitted `keys` are scored; returns {key: Score}. Other threads may wait for other keys."""

    def shutdown(self) -> None: ...


class ResponseScorer(Protocol):
    """Model that scores responses, on its own processes."""

    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        """Score all responses of each task.

        Shapes: float32 [B] per task.
        Raises: NonFiniteError naming the response.
        """


class Collector(Protocol):
    """Generates, scores and filters the groups of a step, and replaces the groups that were dropped."""

    def collect(self, step: int) -> Groups:
        """Return the groups of one step."""


class PendingSave(Protocol):
    """Checkpoint that is being written."""

    def done(self) -> bool:
        """Return whether `result` would return or raise without waiting."""

    def result(self) -> SavedState:
        """Wait until every rank has written its files.

        Raises: ConfigError if the disk is full or read-only; CheckpointError; other errors of a rank.
        """


class SavedModel(Protocol):
    """Model that checkpoints contain."""

    def start_save(self, directory: str, *, snapshot: bool) -> PendingSave:
        """Start writing parameters, optimizer, schedule and random state into an existing directory. With `snapshot`,
        updates may follow before the save has finished and do not affect it; without it, call nothing else until
        PendingSave.result has returned."""

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        """Restore a saved state, in any parallel layout, after comparing `files` with their checksums.

        Raises: DamagedCheckpointError; CheckpointError if it does not fit the model.
        """


class Actor(SavedModel, Protocol):
    """Policy being trained, distributed over ranks."""

    def recompute_logp(self, batch: Batch) -> BatchHandle:
        """Send the batch and compute what its updates need from the current policy (log-probabilities), before the
        first update. The tensors stay on the ranks; later calls take the returned handle."""

    def compare_logp(self, batch: Batch) -> list[LogpGap]:
        """Compare the current policy's log-probabilities with the rollout's, separately for each update. Nothing stays
        on the ranks."""

    def sequence_logp(self, batch: Batch) -> SequenceLogp:
        """Sum the log-probabilities of every response over its trained tokens, for the current policy and for the
        reference, if the run has one; for a reward model, return the scores of the responses instead. Nothing stays on
        the ranks.

        Raises: NonFiniteError naming the responses.
        """

    def reference_logp(self, handle: BatchHandle) -> BatchHandle:
        """Compute the reference policy's log-probabilities of the batch, before its updates. They stay on the ranks."""

    def teacher_outputs(self, handle: BatchHandle, scores: ScoreRefs | None) -> BatchHandle:
        """Compute the teachers' probabilities of the batch on the ranks, before its updates, or send the `scores` of
        Teacher.scores there. They stay on the ranks."""

    def kl_penalties(self, handle: BatchHandle, coefficient: float) -> tuple[BatchHandle, np.ndarray]:
        """Compute KL(policy, reference) times `coefficient` for a batch from `reference_logp`. The per-token values
        stay on the ranks for `estimate`. Returns the handle with the metric reward/kl, and the sum per response,
        float32 [B]."""

    def with_advantages(self, handle: BatchHandle, advantages: np.ndarray) -> BatchHandle:
        """Replace the batch's advantages, float32 [B]; previous results on the ranks stay valid."""

    def refresh_reference(self) -> None:
        """Copy the policy's current weights to the reference."""

    def estimate(self, handle: BatchHandle, values: TokenRefs | None) -> tuple[BatchHandle, TokenRefs]:
        """Compute per-token advantages on the ranks for the batch's updates, from `values` of Critic.values. Also
        returns the returns, for Critic.update."""

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        """Run one optimizer step per entry of the batch's updates. The handle is invalid afterwards.

        Raises: NonFiniteError before the optimizer step if a loss or gradient is not finite.
        """

    def export_hf(self, directory: str, source: str) -> None:
        """Write the weights as a Hugging Face directory; configuration and tokenizer are copied from `source`."""

    def export_adapter(self, directory: str, source: str) -> None:
        """Write the LoRA adapters in PEFT's format; `source` is the base model's directory."""


class Critic(SavedModel, Protocol):
    """Value model, distributed over its own ranks."""

    def values(self, batch: Batch) -> TokenRefs:
        """Compute the value of every trained token; the values stay in the object store."""

    def update(self, values: TokenRefs, returns: TokenRefs) -> dict[str, Metric]:
        """Run one optimizer step per update of the batch of `values`, towards the `returns` from Actor.estimate.

        Raises: NonFiniteError before the optimizer step if a loss or gradient is not finite.
        """


class Teacher(Protocol):
    """Teachers of a distillation on engines, servers or ranks of their own."""

    def scores(self, batch: Batch) -> ScoreRefs:
        """Compute the teachers' log-probabilities of every trained token; they stay in the object store.

        Raises: TeacherError naming the server that does not answer.
        """


class Publisher(Protocol):
    """Sends the actor's weights to every engine."""

    def publish(self, version: int) -> int:
        """Send the weights as `version`; return it after every engine has acknowledged every bucket.

        Raises: WeightSyncError.
        """

    def verify(self) -> int:
        """Compare the weights of engines and actor tensor by tensor; return the number of compared tensors.

        Raises: WeightSyncError listing the tensors that differ.
        """


class Validator(Protocol):
    """Generates and grades responses to the validation prompts."""

    def validate(self, step: int) -> RolloutScalars: ...


class WorkBoard(Protocol):
    """Display of work in progress. Calls return at once and cannot fail."""

    def update(self, work: str, done: float, total: float, unit: str) -> None:
        """Show that `done` of `total` units of `work` are finished. The first call marks its begin."""

    def end(self, work: str) -> None:
        """Remove `work`; does nothing if it is not shown."""
