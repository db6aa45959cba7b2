"""One engine with its graders: turns prompt rows into scored trajectories.

Grading overlaps generation: every response goes to the grading processes the moment its episode ends. Tokens and
log-probabilities stay in flat buffers; only scalars are meant for the driver.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.data.seeds import request_seeds
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.ports import Rewarder
from mcore_rl.rollout.episodes.single_turn import Attempt, Player
from mcore_rl.rollout.journal import Drawn, read_journal
from mcore_rl.rollout.results import Response, scalars_of, write_records
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import (
    EpisodeOutcome,
    GenerationRequest,
    Prompt,
    RolloutScalars,
    RolloutTask,
    SamplingOptions,
    Score,
    TrajectoryBuffers,
)


class RolloutWorker:
    """Generates and scores; calls may run beside each other where the player takes several."""

    def __init__(
        self,
        player: Player,
        rewarder: Rewarder,
        prompts: Mapping[str, PromptSource],
        *,
        failed_reward: float = 0.0,
        has_rules: bool = True,
    ) -> None:
        """`failed_reward`: of an episode that raised. Without rules nothing says whether a response is right: its
        accuracy is then its reward."""
        self._player = player
        self._rewarder = rewarder
        self._prompts = prompts
        self._failed_reward = failed_reward
        self._has_rules = has_rules
        self._keys = itertools.count()
        """Of responses at the rewarder."""

    def run(
        self, task: RolloutTask, ended: Callable[[], None] = lambda: None
    ) -> tuple[TrajectoryBuffers, RolloutScalars]:
        """Generates task.samples_per_prompt responses to every prompt and grades them; calls `ended` for each."""
        attempts = self._attempts(task)
        outcomes: list[EpisodeOutcome | None] = [None] * len(attempts)
        keys = [next(self._keys) for _ in attempts]
        graded_here: list[int] = []

        def grade(place: int, outcome: EpisodeOutcome) -> None:
            outcomes[place] = outcome
            ended()
            if self._submit(keys, place, attempts[place], outcome, task.samples_per_prompt):
                graded_here.append(keys[place])

        started = time.perf_counter()
        drawn = _drawn_before(task, attempts)
        self._player.play(attempts, grade, drawn)
        generated = time.perf_counter()
        collected = self._rewarder.collect(graded_here)
        graded = time.perf_counter()

        finished = [outcome for outcome in outcomes if outcome is not None]
        if len(finished) != len(attempts) or len(collected) != len(graded_here):
            raise RuntimeError(
                f"{len(attempts)} requests gave {len(finished)} outcomes, and {len(graded_here)} of them "
                f"{len(collected)} scores"
            )  # our own invariant: a player or a rewarder that loses work would bias training
        responses = [
            Response(attempt, outcome, self._score(outcome, collected.get(key)))
            for key, attempt, outcome in zip(keys, attempts, finished, strict=True)
        ]
        names = [r.attempt.request.request_id for r in responses for _ in r.outcome.trajectories]
        buffers = pack_trajectories([t for r in responses for t in r.outcome.trajectories], names)
        scalars = replace(
            scalars_of(task, responses, buffers),
            seconds_generating=generated - started,
            seconds_grading=graded - generated,
            tokens_taken_over=sum(outcome.taken_over for outcome in finished),
        )
        if task.records is not None:
            write_records(Path(task.records), task, responses)
        return buffers, scalars

    def _attempts(self, task: RolloutTask) -> list[Attempt]:
        samples = task.samples_per_prompt
        prompts = [self._prompts[task.prompt_set][int(row)] for row in task.prompt_rows]
        seeds = request_seeds(task.seed, task.group_ids, samples)
        return [
            Attempt(
                GenerationRequest(
                    f"{task.prompt_set}.{task.group_ids[i // samples]}.{i % samples}",
                    prompts[i // samples].token_ids,
                    int(seed),
                    _sampling(task.sampling, prompts[i // samples]),
                ),
                prompts[i // samples],
            )
            for i, seed in enumerate(seeds)
        ]

    def _submit(self, keys: Sequence[int], place: int, attempt: Attempt, outcome: EpisodeOutcome, samples: int) -> bool:
        """Hands a response to the graders, unless its episode failed or has a reward of its own; whether it did."""
        group = keys[place - place % samples :][:samples]
        if outcome.reward is not None or outcome.error is not None:
            self._rewarder.withdraw(keys[place], group=group, task=keys)
            return False
        prompt = attempt.prompt
        if outcome.extra:
            prompt = replace(prompt, extra_info={**prompt.extra_info, **outcome.extra})
        tokens = sum(len(trajectory.token_ids) for trajectory in outcome.trajectories)
        self._rewarder.submit(keys[place], prompt, outcome.text, tokens, group=group, task=keys)
        return True

    def _score(self, outcome: EpisodeOutcome, graded: Score | None) -> Score:
        """Of the whole response: what graders or the episode itself say, and the rewards of turns."""
        if outcome.error is not None:
            return Score(self._failed_reward, 0.0, outcome.error, outcome.traceback)
        if graded is None:
            assert outcome.reward is not None
            total = outcome.reward + outcome.turn_rewards
            accuracy = total if outcome.accuracy is None else outcome.accuracy
            return Score(total, accuracy, parts=outcome.parts)
        if graded.error is not None:
            return graded
        parts = {**graded.parts, **outcome.parts}
        reward = graded.reward + outcome.turn_rewards
        accuracy = graded.accuracy if self._has_rules else reward
        return replace(graded, reward=reward, accuracy=accuracy, parts=parts)


def _sampling(options: SamplingOptions, prompt: Prompt) -> SamplingOptions:
    """As the task has it, but for what the prompt's row says; greedy tasks stay greedy."""
    if not prompt.sampling:
        return options
    wanted = dict(prompt.sampling)
    if options.temperature == 0:
        wanted.pop("temperature", None)
    if "max_response_tokens" in wanted:
        wanted["max_response_tokens"] = min(int(wanted["max_response_tokens"]), options.max_response_tokens)
    if "top_k" in wanted:
        wanted["top_k"] = int(wanted["top_k"])
    return replace(options, **wanted)  # type: ignore[arg-type]


def _drawn_before(task: RolloutTask, attempts: Sequence[Attempt]) -> dict[str, Drawn]:
    """What lost engines had drawn for these attempts, by the request's id. Those of later turns bear the id of the
    first, and a seed that hangs on what came before: whoever asks for them looks at it."""
    seeds = {attempt.request.request_id: attempt.request.seed for attempt in attempts}
    found: dict[str, Drawn] = {}
    for journal in task.journals:
        for request_id, drawn in read_journal(Path(journal)).items():
            first, _, later = request_id.partition("/")
            if first in seeds and (later or seeds[first] == drawn.seed):
                found[request_id] = drawn
    return found
