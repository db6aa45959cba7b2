"""One engine with its graders: turns prompt rows into scored trajectories.

Grading overlaps generation: every response goes to the grading processes the moment it finishes. Tokens and
log-probabilities stay in flat buffers; only scalars are meant for the driver.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from mcore_rl.data.records import HALF_CHARACTERS
from mcore_rl.data.seeds import request_seeds
from mcore_rl.data.transcripts import PromptSource, TextDecoder
from mcore_rl.ports import Rewarder
from mcore_rl.rollout.journal import Drawn, read_journal
from mcore_rl.rollout.tasks import UNWATCHED, Progress
from mcore_rl.rollout.trajectories import pack_trajectories, version_spans
from mcore_rl.types import Completion, GenerationRequest, Prompt, RolloutScalars, RolloutTask, Score, TrajectoryBuffers


class Generator(Protocol):
    """An EngineLoop."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_finish: Callable[[Completion], None],
        begun: Callable[[], None],
    ) -> None: ...


class RolloutWorker:
    """Generates and scores; calls may run beside each other where the generator takes several."""

    def __init__(
        self,
        generator: Generator,
        rewarder: Rewarder,
        prompts: Mapping[str, PromptSource],
        decoder: TextDecoder,
    ) -> None:
        self._generator = generator
        self._rewarder = rewarder
        self._prompts = prompts
        self._decoder = decoder
        self._keys = itertools.count()
        """Of responses at the rewarder."""

    def run(self, task: RolloutTask, progress: Progress = UNWATCHED) -> tuple[TrajectoryBuffers, RolloutScalars] | None:
        """Generates the task's responses and grades them, but for those at its end that are withdrawn meanwhile; None
        if all of them are."""
        responses = range(*task.span)
        prompts = self._prompts_of(task)
        seeds = request_seeds(task.seed, task.group_ids, task.samples_per_prompt)
        requests = [
            GenerationRequest(task.request_id(response), prompt.token_ids, int(seeds[response]), task.sampling)
            for response, prompt in zip(responses, prompts, strict=True)
        ]
        index_of = {request.request_id: index for index, request in enumerate(requests)}
        keys = [next(self._keys) for _ in requests]
        completions: list[Completion | None] = [None] * len(requests)
        withdrawn: set[str] = set()
        texts = [""] * len(requests)

        def grade(completion: Completion) -> None:
            if completion.finish_reason == "abort":
                withdrawn.add(completion.request_id)
                return
            index = index_of[completion.request_id]
            completions[index] = completion
            progress.ended()
            texts[index] = self._decoder.decode(completion.token_ids.tolist(), skip_special_tokens=True)
            self._rewarder.submit(keys[index], prompts[index], texts[index], len(completion.token_ids))

        started = time.perf_counter()
        drawn = _drawn_before(task, requests)
        for request in requests:
            found = drawn.get(request.request_id)
            if found is not None and found.finish_reason is not None:
                progress.begun()
                grade(found.completion)
        self._generator.generate(list(_left(requests, drawn)), grade, progress.begun)
        generated = time.perf_counter()
        finished = [completion for completion in completions if completion is not None]
        if len(withdrawn) == len(requests) > 0:
            return None
        keys = keys[: len(requests) - len(withdrawn)]
        collected = self._rewarder.collect(keys)
        graded = time.perf_counter()

        if not len(finished) == len(collected) == len(keys) or withdrawn & {c.request_id for c in finished}:
            raise RuntimeError(
                f"{len(keys)} requests gave {len(finished)} completions and {len(collected)} scores"
            )  # our own invariant: an engine or a rewarder that loses work would bias training
        scores = [collected[key] for key in keys]
        buffers = pack_trajectories(requests[: len(finished)], finished)
        scalars = replace(
            _scalars(task, finished, scores, buffers),
            seconds_generating=generated - started,
            seconds_grading=graded - generated,
            tokens_taken_over=sum(len(drawn[i].completion.token_ids) for i in drawn.keys() - withdrawn),
        )
        if task.records is not None:
            _write_records(Path(task.records), task, prompts, texts, finished, scores)
        return buffers, scalars

    def _prompts_of(self, task: RolloutTask) -> list[Prompt]:
        """One per response; those of a group share theirs."""
        of_group = [self._prompts[task.prompt_set][int(row)] for row in task.prompt_rows]
        return [of_group[response // task.samples_per_prompt] for response in range(*task.span)]


def _drawn_before(task: RolloutTask, requests: Sequence[GenerationRequest]) -> dict[str, Drawn]:
    """What lost engines had drawn for these requests, by id."""
    seeds = {request.request_id: request.seed for request in requests}
    found: dict[str, Drawn] = {}
    for journal in task.journals:
        found |= {i: drawn for i, drawn in read_journal(Path(journal)).items() if seeds.get(i) == drawn.seed}
    return found


def _left(requests: Sequence[GenerationRequest], drawn: Mapping[str, Drawn]) -> Iterator[GenerationRequest]:
    """The requests whose responses have not ended, each with what there is of its response."""
    for request in requests:
        found = drawn.get(request.request_id)
        if found is None:
            yield request
        elif found.finish_reason is None:
            yield replace(request, partial=found.completion)


def _scalars(
    task: RolloutTask, completions: Sequence[Completion], scores: Sequence[Score], buffers: TrajectoryBuffers
) -> RolloutScalars:
    samples = task.samples_per_prompt
    rows = slice(task.span[0], task.span[0] + len(completions))
    response_tokens = np.diff(buffers.response_offsets).astype(np.int32)
    return RolloutScalars(
        group_ids=np.repeat(task.group_ids, samples)[rows],
        prompt_rows=np.repeat(task.prompt_rows, samples)[rows],
        total_tokens=np.diff(buffers.token_offsets).astype(np.int32),
        response_tokens=response_tokens,
        trained_tokens=response_tokens,
        rewards=np.array([s.reward for s in scores], np.float32),
        accuracies=np.array([s.accuracy for s in scores], np.float32),
        clipped=np.array([c.finish_reason == "length" for c in completions], np.uint8),
        versions=np.array([(c.versions[0], c.versions[-1]) for c in completions], np.int32).reshape(-1, 2),
        errors=tuple((i, s.error) for i, s in enumerate(scores) if s.error is not None),
        parts=_numbers(scores),
        traceback=next((s.traceback for s in scores if s.traceback is not None), None),
    )


def _numbers(scores: Sequence[Score]) -> dict[str, np.ndarray]:
    """Every part of a score that is a number, by name; NaN where a response has none. Shapes: float64 [B]."""
    names = {name for score in scores for name, value in score.parts.items() if isinstance(value, float)}
    numbers = {name: np.full(len(scores), np.nan) for name in sorted(names)}
    for index, score in enumerate(scores):
        for name, value in score.parts.items():
            if isinstance(value, float):
                numbers[name][index] = value
    return numbers


def _write_records(
    path: Path,
    task: RolloutTask,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    completions: Sequence[Completion],
    scores: Sequence[Score],
) -> None:
    samples = task.samples_per_prompt
    with open(path, "w", encoding="utf-8", errors=HALF_CHARACTERS) as file:
        for index, completion in enumerate(completions):
            score, prompt = scores[index], prompts[index]
            group, sample = divmod(task.span[0] + index, samples)
            record = {
                **score.parts,
                "prompt": prompt.text,
                "response": texts[index],
                "reward": score.reward,
                "accuracy": score.accuracy,
                "tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "group": int(task.group_ids[group]),
                "sample": sample,
                "version": int(completion.versions[0]),
                "versions": version_spans(completion.versions),
                "ground_truth": prompt.ground_truth,
                "error": score.error,
            }
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
