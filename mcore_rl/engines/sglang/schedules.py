"""Loops of SGLang 0.5.23's scheduler, run one batch at a time (runs in SGLang's environment)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from mcore_rl.engines.sglang.set_capture import SetCapture

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.utils import GenerationBatchResult


class BatchSchedule:
    """Batches of `scheduler`, one after the other, as in Scheduler.event_loop_normal. `sets` records their sets.

    All ranks must make the same calls: to choose a batch may be a collective.
    """

    def __init__(self, scheduler: Scheduler, sets: SetCapture | None = None) -> None:
        self._scheduler, self._sets = scheduler, sets

    @property
    def is_idle(self) -> bool:
        """True if the last call of `run` found no batch to run, and none is in flight. The same on all ranks."""
        return self._scheduler.last_batch is None

    def run(self) -> bool:
        """Run one batch and process its results. Returns whether a request of this rank finished."""
        scheduler = self._scheduler
        batch = self._next_batch()
        if batch:
            self._process_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch
        return batch is not None and any(request.finished() for request in batch.reqs)

    def drain(self) -> bool:
        """Process the results of the batch in flight, and wait until the device has finished its work. Returns False if
        there is none."""
        return False

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Return a context for calls of SGLang's functions that would drain an overlap schedule a second time."""
        yield

    def _process_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        with nullcontext() if self._sets is None else self._sets.appended(batch.reqs, result.logits_output):
            self._scheduler.process_batch_result(batch, result)

    def _next_batch(self) -> ScheduleBatch | None:
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        return plan.batch_to_run


class OverlapSchedule(BatchSchedule):
    """Batches that run while the results of the batch before are processed, as in Scheduler.event_loop_overlap.

    Between two calls, at most the batch that was launched last is in flight. Every call of `run` launches one batch,
    and one more if none is in flight, so ranks with different requests launch equally many.
    """

    def __init__(self, scheduler: Scheduler, sets: SetCapture | None = None) -> None:
        super().__init__(scheduler, sets)
        # Otherwise a request whose last token is in flight takes part in one more batch.
        scheduler.enable_skip_finishing_decode = True

    @property
    def is_idle(self) -> bool:
        return not self._scheduler.result_queue

    def run(self) -> bool:
        """Launch the next batch, then process the results of the batch before. Returns whether a request of this rank
        finished."""
        queue = self._scheduler.result_queue
        if not queue:
            self._launch()
        if not queue:
            self._scheduler.on_idle()
            return False
        if self._next_batch_needs_results():
            finished = self._process()
            self._launch()
            return finished
        self._launch()
        return self._process()

    def drain(self) -> bool:
        if not self._scheduler.result_queue:
            return False
        self._process()
        return True

    @contextmanager
    def drained(self) -> Iterator[None]:
        self._scheduler.enable_overlap = False  # pause_generation would take results from the empty queue
        try:
            yield
        finally:
            self._scheduler.enable_overlap = True

    def _next_batch_needs_results(self) -> bool:
        """Return True if penalties of the next batch depend on tokens in flight. SGLang would apply them one token
        late."""
        in_flight = self._scheduler.last_batch
        info = None if in_flight is None else in_flight.sampling_info  # None in a batch without requests
        return info is not None and bool(info.penalizer_orchestrator.is_required)

    def _launch(self) -> None:
        scheduler = self._scheduler
        batch = self._next_batch()
        if batch:
            result = scheduler.run_batch(batch)
            # Later writes to memory that this batch reads, such as the table of KV cache slots, wait for the batch.
            scheduler._apply_war_barrier()
            # A copy: SGLang adds requests to the batch and removes others before the results are processed.
            scheduler.result_queue.append((batch.copy(), result))
        scheduler.last_batch = batch

    def _process(self) -> bool:
        """Process the results of one batch. Returns whether a request finished."""
        batch, result = self._scheduler.result_queue.popleft()
        # Requests that finished in the batch before have taken part in this one.
        running = [request for request in batch.reqs if not request.finished()]
        self._process_result(batch, result)
        return any(request.finished() for request in running)
