"""Generation and grading on one engine: turns prompt rows into scored trajectories.

Grading overlaps generation: each response is submitted to the grading processes as soon as its episode ends. Tokens and
log-probabilities stay in flat buffers; only scalars go to the driver.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcore_rl.data.seeds import request_seeds
from mcore_rl.data.sources.row_options import with_overrides
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.ports import Rewarder
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptBatch, Player
from mcore_rl.rollout.journal import JournaledResponse, read_lost_journal
from mcore_rl.rollout.results import Response, scalars_of, write_records
from mcore_rl.rollout.tasks import NO_CALLBACKS, RequestCallbacks
from mcore_rl.rollout.trajectories import hinted_prompt, pack_trajectories
from mcore_rl.types import (
    EpisodeOutcome,
    GenerationRequest,
    Prompt,
    PromptImages,
    RolloutScalars,
    RolloutTask,
    SamplingOptions,
    Score,
    TrajectoryBuffers,
)
from mcore_rl.vision.processor import ImageProcessor


@dataclass
class RolloutWorker:
    """Generates and grades tasks. Calls of `run` may overlap if the player supports it.

    failed_reward: reward of an episode that raised an error. Without rules (`has_rules`), no grader decides whether a
    response is right; its accuracy is then its reward. images: image processor of a model that reads images.
    """

    player: Player
    rewarder: Rewarder
    prompts: Mapping[str, PromptSource]
    failed_reward: float = 0.0
    has_rules: bool = True
    images: ImageProcessor | None = None
    _keys: Iterator[int] = field(default_factory=itertools.count, init=False)
    """Unique keys of responses at the rewarder."""

    def run(
        self, task: RolloutTask, callbacks: RequestCallbacks = NO_CALLBACKS
    ) -> tuple[TrajectoryBuffers, RolloutScalars] | None:
        """Generate and grade the task's responses, except for withdrawn ones at its end. Returns None if all are
        withdrawn."""
        attempts = self._attempts(task)
        outcomes: list[EpisodeOutcome | None] = [None] * len(attempts)
        withdrawn: set[int] = set()
        keys = [next(self._keys) for _ in attempts]
        group_of = _groups_of_keys(task, keys)
        graded_here: list[int] = []

        def end(place: int, outcome: EpisodeOutcome | None) -> None:
            outcomes[place] = outcome
            if outcome is None:
                withdrawn.add(place)
            else:
                callbacks.ended()
            # Episodes with their own reward, and failed ones, are not graded: graders of groups must not wait for them.
            if outcome is None or outcome.reward is not None or outcome.error is not None:
                self.rewarder.withdraw(keys[place], group=group_of[place], task=keys)
                return
            graded_here.append(keys[place])
            text, tokens = outcome.text, sum(len(trajectory.token_ids) for trajectory in outcome.trajectories)
            # Graders read texts: images of several megabytes would be sent to their processes once per response.
            prompt = replace(attempts[place].prompt, images=(), hint_ids=None)
            if outcome.extra:  # graders receive the episode's fields
                prompt = replace(prompt, extra_info={**prompt.extra_info, **outcome.extra})
            self.rewarder.submit(keys[place], prompt, text, tokens, group=group_of[place], task=keys)

        # Each response is graded as soon as it ends (in `end`), so that grading overlaps the generation of the others.
        started = time.perf_counter()
        recovered = _recovered_responses(task, attempts)
        self.player.play(AttemptBatch(attempts, callbacks.started, end, recovered))
        generated = time.perf_counter()
        # Withdrawn responses are always at the end of the task; the driver has given them to another engine.
        if len(withdrawn) == len(attempts) > 0:
            return None
        attempts = attempts[: len(attempts) - len(withdrawn)]
        collected = self.rewarder.collect(graded_here)
        graded = time.perf_counter()
        finished = [outcome for outcome in outcomes[: len(attempts)] if outcome is not None]
        if len(finished) != len(attempts) or len(collected) != len(graded_here):
            raise RuntimeError(
                f"{len(attempts)} requests gave {len(finished)} outcomes, and {len(graded_here)} of them "
                f"{len(collected)} scores"
            )  # internal invariant: a player or rewarder that loses responses would bias training
        responses = [
            Response(attempt, outcome, self._score(outcome, collected.get(key)))
            # Not strict: `keys` also has those of withdrawn responses, at its end.
            for key, attempt, outcome in zip(keys, attempts, finished, strict=False)
        ]
        return _packed(task, responses, (generated - started, graded - generated))

    def _attempts(self, task: RolloutTask) -> list[Attempt]:
        of_group = [self.prompts[task.prompt_set][int(row)] for row in task.prompt_rows]
        first, last = task.span
        num_samples = task.samples_per_prompt
        # Once per prompt, not per response, and not for prompts of which other engines generate all responses.
        images = {
            group: self._processed(task.prompt_set, of_group[group])
            for group in range(first // num_samples, -(-last // num_samples))
        }
        seeds = request_seeds(task.seed, task.group_ids, task.samples_per_prompt)
        attempts = []
        for response in range(*task.span):
            prompt, seed = of_group[response // task.samples_per_prompt], int(seeds[response])
            options, spans = _sampling(task.sampling, prompt), task.spans[response] if task.spans else ()
            name, per_version = task.request_id(response), task.tokens_per_version
            request = GenerationRequest(
                name,
                prompt.token_ids,
                seed,
                options,
                tokens_per_version=per_version,
                spans=spans,
                images=images[response // num_samples],
            )
            attempts.append(Attempt(request, prompt, trained=task.is_trained))
        return attempts

    def _processed(self, prompt_set: str, prompt: Prompt) -> PromptImages | None:
        if not prompt.images:
            return None
        assert self.images is not None, "the prompts were tokenized with an image processor"
        return self.images.process(prompt.images, prompt.token_ids, f"prompt {prompt.row + 1} of {prompt_set}")

    def _score(self, outcome: EpisodeOutcome, graded: Score | None) -> Score:
        """Combine the score of graders, or of the episode itself, with the rewards of turns."""
        if outcome.error is not None:
            return Score(self.failed_reward, 0.0, outcome.error, outcome.traceback)
        if graded is None:
            assert outcome.reward is not None
            total = outcome.reward + outcome.turn_rewards
            accuracy = total if outcome.accuracy is None else outcome.accuracy
            return Score(total, accuracy, parts=outcome.parts)
        if graded.error is not None:
            return graded
        parts = {**graded.parts, **outcome.parts}
        reward = graded.reward + outcome.turn_rewards
        accuracy = graded.accuracy if self.has_rules else reward
        return replace(graded, reward=reward, accuracy=accuracy, parts=parts)


def _packed(
    task: RolloutTask, responses: list[Response], seconds: tuple[float, float]
) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Pack the responses of a task, and write its records."""
    names = [r.attempt.request.request_id for r in responses for _ in r.outcome.trajectories]
    longest = task.sampling.max_response_tokens
    hints = [hinted_prompt(t, r.attempt.prompt, longest) for r in responses for t in r.outcome.trajectories]
    buffers = pack_trajectories([t for r in responses for t in r.outcome.trajectories], names, hints)
    scalars = scalars_of(task, responses, buffers, seconds)
    if task.records is not None:
        write_records(Path(task.records), task, responses)
    return buffers, scalars


def _groups_of_keys(task: RolloutTask, keys: Sequence[int]) -> list[list[int]]:
    """Return, for each response of the task, the keys of all responses to its prompt."""
    prompts = [response // task.samples_per_prompt for response in range(*task.span)]
    keys_of = defaultdict[int, list[int]](list)
    for prompt, key in zip(prompts, keys, strict=True):
        keys_of[prompt].append(key)
    return [keys_of[prompt] for prompt in prompts]


def _sampling(options: SamplingOptions, prompt: Prompt) -> SamplingOptions:
    """Return the task's sampling options with the overrides of the prompt's row; greedy tasks stay greedy."""
    if not prompt.sampling:
        return options
    # A row may shorten responses but not lengthen them: the run's limit sizes engines and batches.
    chosen = with_overrides(options, prompt.sampling)
    return replace(chosen, max_response_tokens=min(chosen.max_response_tokens, options.max_response_tokens))


def _recovered_responses(task: RolloutTask, attempts: Sequence[Attempt]) -> dict[str, JournaledResponse]:
    """Return the responses that lost engines sampled for these attempts, by request id.

    Requests of later turns have the id of the first as prefix, and a seed that depends on the history: the reader
    compares the seed.
    """
    seeds = {attempt.request.request_id: attempt.request.seed for attempt in attempts}
    found: dict[str, JournaledResponse] = {}
    # Later journals overwrite earlier ones: an engine that continued a response has also journaled its beginning.
    for journal in task.journals:
        episodes = read_lost_journal(journal)
        for first, seed in seeds.items():
            for request_id, recovered in episodes.get(first, {}).items():
                # Only the first turn's seed is known here; later turns are compared when they are requested.
                same_seed = first != request_id or seed == recovered.seed
                if same_seed and recovered.completion.versions[0] >= task.version:
                    found[request_id] = recovered
    return found
