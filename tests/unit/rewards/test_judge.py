"""A judge on a fake engine that echoes questions: order, seeds, means, and answers without a score."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.data.records import amend_part
from mcore_rl.data.trajectories import join_rows, take_rows
from mcore_rl.data.transcripts import Transcript
from mcore_rl.rewards.judge.answers import EngineAnswerer
from mcore_rl.rewards.judge.judge import Judge, JudgeVerdict, describe
from mcore_rl.rewards.judge.prompts import JudgePrompts
from mcore_rl.rewards.judge.scores import score_reader
from mcore_rl.rewards.task_parts import TaskPart, TranscriptReader, join_scores, split_tasks
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import (
    Completion,
    GenerationRequest,
    Mean,
    Metric,
    Prompt,
    RolloutScalars,
    RolloutTask,
    SamplingOptions,
    Trajectory,
    TrajectoryBuffers,
    merge_metrics,
)
from tests.unit.rollouts import scalars_of

CONFIG = JudgeConfig(template="{prompt}={response}", unparsable=-1, max_prompt_tokens=12)


class Parrot:
    """A fake engine that answers with `says(question, request)`. The last request finishes first."""

    def __init__(self, tokenizer: Any, says: Callable[[str, GenerationRequest], str]) -> None:
        self.tokenizer, self.says, self.calls = tokenizer, says, []

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None:
        self.calls.append(list(requests))
        for request in reversed(requests):
            question = self.tokenizer.decode(request.token_ids)
            ids = np.array(self.tokenizer(self.says(question, request))["input_ids"], np.int32)
            ids = ids[: request.sampling.max_response_tokens]
            cut = len(ids) == request.sampling.max_response_tokens
            reason = "length" if cut else "stop"
            on_finish(Completion(request.request_id, ids, np.zeros(len(ids), np.float32), reason, 0 * ids))


def length_of_the_response(question: str, _: GenerationRequest) -> str:
    return f"{question} Score: {len(question.partition('=')[2])}."


def judge_of(
    tokenizer: Any, config: JudgeConfig = CONFIG, says: Callable[..., str] = length_of_the_response, seed: int = 1
) -> Judge:
    engine = Parrot(tokenizer, says)
    assert config.template is not None
    questions = JudgePrompts(tokenizer, config.template)
    answerer = EngineAnswerer(engine, questions, tokenizer, config)  # type: ignore[arg-type]
    reader = TranscriptReader({"train": [prompt_of(0), prompt_of(1, "2+2")]}, tokenizer)
    return Judge(answerer, score_reader(config), reader, config, seed)


def prompt_of(row: int, text: str = "1+1") -> Prompt:
    messages = [{"role": "user", "content": text}]
    return Prompt(row, np.array([49], np.int32), text, "src", "2", messages=messages)


def judged(judge: Judge, texts: Sequence[str], group_ids: Sequence[int], samples: Sequence[int]) -> list[JudgeVerdict]:
    given = [Transcript(prompt_of(0), text) for text in texts]
    return judge.verdicts(given, np.array(group_ids), np.array(samples))


def test_every_response_has_its_own_score_whatever_finishes_first(tokenizer: Any) -> None:
    judge = judge_of(tokenizer, replace(CONFIG, temperature=0.7, top_p=0.9, max_response_tokens=30))
    found = judged(judge, ["a", "", "ccc"], [4, 4, 5], [0, 1, 0])
    assert judge.answerer.engine.calls[0][0].sampling == SamplingOptions(30, 0.7, 0.9)  # type: ignore[attr-defined]
    assert [verdict.score for verdict in found] == [1, 0, 3]
    assert found[2].answers[0].text == "1+1=ccc Score: 3."
    assert found[2].record() == {
        "judge": [{"text": "1+1=ccc Score: 3.", "tokens": 17, "finish_reason": "stop", "score": 3.0, "error": None}]
    }


def test_judge_too_long_response_is_neither_sent_nor_truncated(tokenizer: Any) -> None:
    judge = judge_of(tokenizer)
    found = judged(judge, ["12345678", "123456789", "1"], [0, 0, 0], [0, 1, 2])  # 12, 13 and 5 tokens
    assert [verdict.score for verdict in found] == [8, -1, 1]
    (answer,) = found[1].answers
    assert (answer.text, answer.finish_reason, answer.score) == ("", None, None)
    assert answer.error == "the question has 13 tokens, judge.max_prompt_tokens is 12"
    assert [len(request.token_ids) for request in judge.answerer.engine.calls[0]] == [12, 5]  # type: ignore[attr-defined]
    judged(judge, ["123456789"], [0], [0])
    assert len(judge.answerer.engine.calls) == 1  # type: ignore[attr-defined]


def test_several_answers_count_as_their_mean(tokenizer: Any) -> None:
    def says(_: str, request: GenerationRequest) -> str:
        return ["Score: 1.", "Score: 4.", "none"][int(request.request_id.rpartition(".")[2])]

    found = judged(judge_of(tokenizer, replace(CONFIG, samples=3, temperature=1.0), says), ["a"], [0], [0])
    assert [answer.score for answer in found[0].answers] == [1, 4, None]
    assert found[0].answers[2].error == "judge.score_pattern matches nothing"
    assert found[0].score == pytest.approx((1 + 4 - 1) / 3)


def seeds(tokenizer: Any, group_ids: Sequence[int], samples: Sequence[int], seed: int = 1) -> list[int]:
    judge = judge_of(tokenizer, replace(CONFIG, samples=2, temperature=1.0), seed=seed)
    judged(judge, ["a"] * len(group_ids), group_ids, samples)
    return [request.seed for request in judge.answerer.engine.calls[0]]  # type: ignore[attr-defined]


def test_seeds_come_from_run_group_and_sample_alone(tokenizer: Any) -> None:
    together = seeds(tokenizer, [7, 7, 8], [0, 3, 3])
    assert len(set(together)) == 6
    assert seeds(tokenizer, [7], [3]) == together[2:4]
    assert seeds(tokenizer, [7], [3], seed=2) != together[2:4]


def test_figures_tell_what_counts_as_none_apart(tokenizer: Any) -> None:
    judge = judge_of(tokenizer, replace(CONFIG, max_response_tokens=15))
    # Answers: 14 tokens; 15 tokens (cut at the score, before the full stop); none.
    found = judged(judge, ["", "22", "1234567890"], [0, 0, 0], [0, 1, 2])
    assert [verdict.score for verdict in found] == [0, -1, -1]
    values = {name: metric.value for name, metric in describe(found).items()}
    assert values == {
        "judge/unparsable_fraction": pytest.approx(2 / 3),
        "judge/too_long_fraction": pytest.approx(1 / 3),
        "judge/failed_fraction": 0,
        "judge/clipped_fraction": 0.5,
        "judge/response_tokens": 14.5,
    }


def task_of(index: int, groups: Sequence[int], records: Path | None = None) -> RolloutTask:
    part = None if records is None else str(records / f".step_1.0.{index}.part")
    ids = np.array(groups, np.int64)
    return RolloutTask("train", ids % 2, ids, 3, SamplingOptions(4), 1, part)


def result_of(tokenizer: Any, task: RolloutTask) -> tuple[Any, RolloutScalars]:
    """Return trajectories and scalars of a task; response s to the prompt of group g has g + s letters."""
    groups = np.repeat(task.group_ids, task.samples_per_prompt)
    samples = np.tile(np.arange(task.samples_per_prompt), len(task.group_ids))
    trajectories = []
    for length in groups + samples:
        ids = np.array([*tokenizer("x" * int(length))["input_ids"], tokenizer.eos_token_id], np.int32)
        trajectories.append(Trajectory(np.array([49], np.int32), ids, np.zeros(len(ids), np.float32), 0 * ids))
    scalars = scalars_of(groups, prompt_rows=np.repeat(task.prompt_rows, task.samples_per_prompt))
    return pack_trajectories(trajectories), scalars


def scored(
    judge: Judge, parts: Sequence[TaskPart], chunks: Sequence[TrajectoryBuffers]
) -> tuple[dict[int, float], dict[str, Metric]]:
    """Score the parts of a judge that are not empty."""
    own = [(part, take_rows(chunk, part.rows)) for part, chunk in zip(parts, chunks, strict=True) if len(part.rows)]
    return judge.score([part for part, _ in own], join_rows([chunk for _, chunk in own])) if own else ({}, {})


@pytest.mark.parametrize("num_judges", [1, 2, 5, 20])
def test_judges_share_all_responses_and_each_is_scored_once(tokenizer: Any, tmp_path: Path, num_judges: int) -> None:
    tasks = [task_of(0, [3, 0], tmp_path), task_of(1, [], tmp_path), task_of(2, [1], tmp_path), task_of(3, [2])]
    results = [result_of(tokenizer, task) for task in tasks]
    chunks, scalars = [chunk for chunk, _ in results], [of_task for _, of_task in results]
    for task, of_task in zip(tasks, scalars, strict=True):
        if task.records is not None:
            Path(task.records).write_text('{"response": "?"}\n' * len(of_task.group_ids))
    given = split_tasks(tasks, scalars, num_judges)
    sizes = [sum(len(part.rows) for part in own) for own in given]
    assert sum(sizes) == 12
    assert min(sizes) >= min(1, 12 // num_judges)

    judge = judge_of(tokenizer)
    scores: dict[int, float] = {}
    metrics = []
    for own in given:
        found, figures = scored(judge, own, chunks)
        assert not scores.keys() & found.keys()
        scores |= found
        metrics.append(figures)
    joined = join_scores(tasks, scalars, scores)
    assert [values.tolist() for values in joined] == [[3, 4, 5, 0, 1, 2], [], [1, 2, 3], [2, 3, 4]]
    assert joined[0].dtype == np.float32
    assert merge_metrics(metrics)["judge/unparsable_fraction"] == Mean(0, 12)

    for task, values in zip(tasks, joined, strict=True):
        if task.records is not None:
            amend_part(task.records, values, values, {"judge": values})
    lines = [json.loads(line) for line in Path(str(tasks[0].records)).read_text().splitlines()]
    assert [line["judge"][0]["score"] for line in lines] == [3, 4, 5, 0, 1, 2]
    assert lines[0]["judge"][0]["text"] == "2+2=xxx Score: 3."
    assert lines[3]["judge"][0]["text"] == "1+1= Score: 0."
    assert sorted(path.name for path in tmp_path.glob(".*")) == [f".step_1.0.{i}.part" for i in (0, 1, 2)]


def test_a_response_has_the_seed_of_its_group_and_number_whoever_judges_it(tokenizer: Any) -> None:
    def asked(num_judges: int) -> dict[str, int]:
        task = task_of(0, [4, 1])  # two prompts, and responses of different lengths
        buffers, scalars = result_of(tokenizer, task)
        found = {}
        for own in split_tasks([task], [scalars], num_judges):
            judge = judge_of(tokenizer, replace(CONFIG, temperature=1.0))
            scored(judge, own, [buffers])
            for request in judge.answerer.engine.calls[0]:  # type: ignore[attr-defined]
                found[tokenizer.decode(request.token_ids)] = request.seed
        return found

    alone = asked(1)
    assert alone == asked(2)
    assert len(set(alone.values())) == 6
