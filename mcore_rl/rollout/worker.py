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
from mcore_rl.rollout.trajectories import pack_trajectories, version_spans
from mcore_rl.types import Completion, GenerationRequest, Prompt, RolloutScalars, RolloutTask, Score, TrajectoryBuffers


class Generator(Protocol):
    """An Engine or its EngineLoop."""

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None: ...


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

    def run(
        self, task: RolloutTask, ended: Callable[[], None] = lambda: None
    ) -> tuple[TrajectoryBuffers, RolloutScalars]:
        """Generates task.samples_per_prompt responses to every prompt and grades them; calls `ended` for each."""
        samples = task.samples_per_prompt
        prompts = [self._prompts[task.prompt_set][int(row)] for row in task.prompt_rows]
        seeds = request_seeds(task.seed, task.group_ids, samples)
        requests = [
            GenerationRequest(
                f"{task.prompt_set}.{task.group_ids[i // samples]}.{i % samples}",
                prompts[i // samples].token_ids,
                int(seed),
                task.sampling,
            )
            for i, seed in enumerate(seeds)
        ]
        index_of = {request.request_id: index for index, request in enumerate(requests)}
        keys = [next(self._keys) for _ in requests]
        completions: list[Completion | None] = [None] * len(requests)
        texts = [""] * len(requests)

        def grade(completion: Completion) -> None:
            index = index_of[completion.request_id]
            completions[index] = completion
            ended()
            texts[index] = self._decoder.decode(completion.token_ids.tolist(), skip_special_tokens=True)
            group = keys[index - index % samples :][:samples]
            self._rewarder.submit(
                keys[index],
                prompts[index // samples],
                texts[index],
                len(completion.token_ids),
                group=group,
                task=keys,
            )

        started = time.perf_counter()
        drawn = _drawn_before(task, requests)
        for request in requests:
            found = drawn.get(request.request_id)
            if found is not None and found.finish_reason is not None:
                grade(found.completion)
        self._generator.generate(list(_left(requests, drawn)), grade)
        generated = time.perf_counter()
        collected = self._rewarder.collect(keys)
        graded = time.perf_counter()

        finished = [completion for completion in completions if completion is not None]
        if len(finished) != len(requests) or len(collected) != len(requests):
            raise RuntimeError(
                f"{len(requests)} requests gave {len(finished)} completions and {len(collected)} scores"
            )  # our own invariant: an engine or a rewarder that loses work would bias training
        scores = [collected[key] for key in keys]
        buffers = pack_trajectories(requests, finished)
        scalars = replace(
            _scalars(task, finished, scores, buffers),
            seconds_generating=generated - started,
            seconds_grading=graded - generated,
            tokens_taken_over=sum(len(found.completion.token_ids) for found in drawn.values()),
        )
        if task.records is not None:
            _write_records(Path(task.records), task, prompts, texts, finished, scores)
        return buffers, scalars


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
    response_tokens = np.diff(buffers.response_offsets).astype(np.int32)
    return RolloutScalars(
        group_ids=np.repeat(task.group_ids, samples),
        prompt_rows=np.repeat(task.prompt_rows, samples),
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
        for index, (text, completion) in enumerate(zip(texts, completions, strict=True)):
            score, prompt = scores[index], prompts[index // samples]
            record = {
                **score.parts,
                "prompt": prompt.text,
                "response": text,
                "reward": score.reward,
                "accuracy": score.accuracy,
                "tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "group": int(task.group_ids[index // samples]),
                "sample": index % samples,
                "version": int(completion.versions[0]),
                "versions": version_spans(completion.versions),
                "ground_truth": prompt.ground_truth,
                "error": score.error,
            }
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
