"""Output of a rollout worker: aligned flat buffers, scalars in prompt order, one record per response."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.reward import TAKEN
from mcore_rl.data.records import add_fields, amend_part
from mcore_rl.data.seeds import request_seeds
from mcore_rl.data.trajectories import join_rows
from mcore_rl.errors import McoreRLError
from mcore_rl.ports import Rewarder
from mcore_rl.rollout.episodes.single_turn import Attempt, SingleTurnPlayer
from mcore_rl.rollout.journal import JournaledResponse, TokenJournal, read_journal
from mcore_rl.rollout.results import join_scalars
from mcore_rl.rollout.tasks import RequestCallbacks
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.rollout.worker import RolloutWorker, _recovered_responses
from mcore_rl.types import Completion, Delta, GenerationRequest, Prompt, RolloutTask, SamplingOptions, Score, Trajectory
from tests.unit.rollout.made import Digits

Finish = Callable[[Completion], None]


class BackwardsEngine:
    """Answers prompt [p, ...] with p copies of (seed mod 50), and finishes the last request first."""

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Finish, begun: Callable[[], None]) -> None:
        for request in reversed(requests):
            count = int(request.token_ids[0])
            ids = np.full(count, request.seed % 50, np.int32)
            logp = -np.arange(count, dtype=np.float32)
            reason = "length" if count == request.sampling.max_response_tokens else "stop"
            on_finish(Completion(request.request_id, ids, logp, reason, np.full(count, 7, np.int32)))


class LengthRewarder:
    """Rewards the number of tokens; fails on responses of 3 tokens."""

    def __init__(self) -> None:
        self.scores: dict[int, Score] = {}

    def submit(self, key: int, prompt: Prompt, response_text: str, response_tokens: int, **batch: object) -> None:
        parts = {"half": response_tokens / 2, "said": response_text} | ({"long": 1.0} if response_tokens == 4 else {})
        good = Score(float(response_tokens), 1.0, parts=parts)
        self.scores[key] = Score(0.0, 0.0, "raised", f"at {key}") if response_tokens == 3 else good

    def withdraw(self, key: int, **_: object) -> None: ...

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        return {key: self.scores.pop(key) for key in keys}


class GroupRewarder(LengthRewarder):
    """Records which responses are graded together."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[int, list[int], list[int]]] = {}

    def submit(self, key: int, prompt: Prompt, *rest: object, **batch: object) -> None:
        self.seen[key] = prompt.row, list(batch["group"]), list(batch["task"])
        super().submit(key, prompt, *rest)


class HalfEmojiRewarder(LengthRewarder):
    def submit(self, key: int, *_: object, **batch: object) -> None:
        self.scores[key] = Score(0.0, 0.0, "not an answer: \ud83d")


PROMPTS = {
    "train": [
        Prompt(row, np.array([1 + row, 9, 9][: 2 + row % 2], np.int32), f"p{row}", "src", str(row)) for row in range(4)
    ]
}


def worker_of(engine: object, rewarder: object = None) -> RolloutWorker:
    player = SingleTurnPlayer(engine, Digits())  # type: ignore[arg-type]
    return RolloutWorker(player, rewarder or LengthRewarder(), PROMPTS)  # type: ignore[arg-type]


def run(
    tmp_path: Path, rows: list[int], group_ids: list[int], samples: int = 2, rewarder: Rewarder | None = None
) -> Any:
    records = str(tmp_path / "records")
    task = RolloutTask("train", np.array(rows), np.array(group_ids), samples, SamplingOptions(4), 1, records)
    return worker_of(BackwardsEngine(), rewarder).run(task)


def test_worker_submits_keys_of_group_and_task(tmp_path: Path) -> None:
    rewarder = GroupRewarder()
    run(tmp_path, rows=[2, 0, 1], group_ids=[10, 11, 12], samples=3, rewarder=rewarder)
    rows: dict[int, set[int]] = {}
    for key, (row, group, task) in rewarder.seen.items():
        rows.setdefault(row, set()).add(key)
        assert key in group
        assert sorted(task) == sorted(rewarder.seen)
    for key, (row, group, _) in rewarder.seen.items():
        assert (set(group), len(group)) == (rows[row], 3), key


def test_worker_results_are_in_prompt_order(tmp_path: Path) -> None:
    buffers, scalars = run(tmp_path, rows=[2, 0], group_ids=[10, 11])
    assert scalars.group_ids.tolist() == [10, 10, 11, 11]
    assert scalars.prompt_rows.tolist() == [2, 2, 0, 0]
    assert scalars.response_tokens.tolist() == [3, 3, 1, 1]
    assert buffers.prompt_tokens.tolist() == [2, 2, 2, 2]
    assert scalars.total_tokens.tolist() == [5, 5, 3, 3]
    seeds = request_seeds(1, np.array([10, 11]), 2) % 50
    expected = [3, 9, *[seeds[0]] * 3, 3, 9, *[seeds[1]] * 3, 1, 9, seeds[2], 1, 9, seeds[3]]
    assert buffers.tokens.tolist() == expected
    assert buffers.token_offsets.tolist() == [0, 5, 10, 13, 16]
    assert buffers.response_offsets.tolist() == [0, 3, 6, 7, 8]
    assert buffers.logp_rollout.tolist() == [0, -1, -2, 0, -1, -2, 0, 0]
    assert set(buffers.versions.tolist()) == {7}
    assert buffers.routed_experts is None


def test_worker_scores_and_errors_match_responses(tmp_path: Path) -> None:
    _, scalars = run(tmp_path, rows=[3, 2, 0], group_ids=[0, 1, 2], samples=1)
    assert scalars.clipped.tolist() == [1, 0, 0]
    assert scalars.rewards.tolist() == [4, 0, 1]
    assert (scalars.errors, scalars.traceback) == (((1, "raised"),), "at 1")
    assert scalars.parts.keys() == {"half", "long"}
    np.testing.assert_array_equal(scalars.parts["half"], [2, np.nan, 0.5])
    np.testing.assert_array_equal(scalars.parts["long"], [1, np.nan, np.nan])
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [record.get("half") for record in records] == [2, None, 0.5]
    assert records[0]["said"] == records[0]["response"]
    assert records[2].keys() - {"half", "said"} <= TAKEN, "a part of a score could have the name of a field"


def test_worker_records_have_the_contract_keys(tmp_path: Path) -> None:
    run(tmp_path, rows=[1, 0], group_ids=[4, 5], samples=3)
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [(r["group"], r["sample"]) for r in records] == [(4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2)]
    assert {"prompt", "response", "reward", "tokens", "group", "version"} <= set(records[0])
    assert records[0]["prompt"] == "p1"
    assert records[0]["version"] == 7


def test_worker_records_keep_lone_surrogates(tmp_path: Path) -> None:
    run(tmp_path, rows=[1], group_ids=[4], samples=1, rewarder=HalfEmojiRewarder())
    part, ones = str(tmp_path / "records"), np.ones(1, np.float32)
    add_fields(part, [0], [{"judge": "\ude00"}])
    amend_part(part, ones, ones, {})
    record = json.loads(Path(part).read_text(encoding="utf-8"))
    assert (record["error"], record["judge"]) == ("not an answer: \ud83d", "\ude00")


def test_worker_requests_have_limit_and_spans_of_the_task() -> None:
    worker = worker_of(BackwardsEngine())
    spans = tuple(((0, 0, 1), (1, 1, 2 + response)) for response in range(4))
    task = RolloutTask("train", np.array([0, 1]), np.array([4, 5]), 2, SamplingOptions(4), 1, tokens_per_version=3)
    assert [(a.request.tokens_per_version, a.request.spans) for a in worker._attempts(task)] == [(3, ())] * 4
    task = replace(task, spans=spans, responses=(1, 3))
    assert [attempt.request.spans for attempt in worker._attempts(task)] == [spans[1], spans[2]]


def test_request_seeds_differ_and_fit_engines() -> None:
    seeds = np.concatenate([request_seeds(run, np.arange(2000), 16) for run in (0, 1, 2)])
    assert len(np.unique(seeds)) > 0.9999 * len(seeds)  # 96,000 samples of 31 bits: a few random collisions
    assert seeds.min() >= 0
    assert seeds.max() < 2**31
    alone, together = request_seeds(3, np.array([17]), 4), request_seeds(3, np.array([5, 17, 9]), 4)
    assert np.array_equal(alone, together[4:8])


def of_two_responses(prompts: Sequence[int], responses: Sequence[int]) -> list[Trajectory]:
    """Build routed experts with two layers and one expert per token: 10 * sample + position, and the same plus 100."""
    rows = [np.arange(p + r - 1) + 10 * i for i, (p, r) in enumerate(zip(prompts, responses, strict=True))]
    experts = [np.stack([row, row + 100], 1)[..., None].astype(np.uint8) for row in rows]
    made = []
    for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        zeros = np.zeros(r, np.int32)
        made.append(Trajectory(np.full(p, i, np.int32), zeros, zeros * 0.0, zeros, routed_experts=experts[i]))
    return made


def test_worker_experts_align_with_tokens() -> None:
    first, second = of_two_responses([3, 1], [2, 3])
    buffers = pack_trajectories([first, second], ["8.0", "8.1"])
    assert buffers.routed_experts is not None
    assert buffers.routed_experts.dtype == np.uint8
    assert buffers.routed_experts.shape == (len(buffers.tokens), 2, 1)
    assert buffers.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 10, 11, 12, 0]
    assert buffers.routed_experts[:, 1, 0].tolist() == [100, 101, 102, 103, 0, 110, 111, 112, 0]
    with pytest.raises(McoreRLError, match=r"router_replay=engine: 1 of 2 responses .* experts .*: 8\.1$"):
        pack_trajectories([first, replace(second, routed_experts=None)], ["8.0", "8.1"])


def test_worker_continues_responses_of_lost_engines(tmp_path: Path) -> None:
    """Of two samples, one had finished and one had started; the third journal belongs to a request with another
    seed."""
    submitted: list[GenerationRequest] = []
    own = TokenJournal(tmp_path / "own")

    class GoesOn(BackwardsEngine):
        def take_over(self, responses: Sequence[JournaledResponse]) -> Future[None]:
            done: Future[None] = Future()
            done.set_result(own.take_over(responses))
            return done

        def generate(self, requests: Sequence[GenerationRequest], on_finish: Finish, begun: Callable[[], None]) -> None:
            submitted.extend(requests)
            for request in requests:
                before = [] if request.partial is None else request.partial.token_ids.tolist()
                ids = np.array([*before, 40], np.int32)
                on_finish(Completion(request.request_id, ids, np.zeros(len(ids), np.float32), "stop", ids * 0 + 8))

    seeds = request_seeds(1, np.array([5]), 3).tolist()
    older, newer = TokenJournal(tmp_path / "older"), TokenJournal(tmp_path / "newer")
    sampling = SamplingOptions(4)
    requests = [
        GenerationRequest(f"train.5.{i}", np.array([1, 9], np.int32), seed, sampling) for i, seed in enumerate(seeds)
    ]
    older.begin(requests[:2])
    older.add([Delta("train.5.0", [31], [-0.5], 7), Delta("train.5.1", [32], [-0.25], 7)], [])
    partial = read_journal(tmp_path / "older")["train.5.1"].completion
    newer.begin([replace(requests[1], partial=partial), replace(requests[2], seed=1)])
    nothing = np.zeros(0, np.int32)
    whole = Completion("train.5.1", nothing, nothing.astype(np.float32), "stop", nothing)
    newer.add([Delta("train.5.1", [33], [-1.0], 8), Delta("train.5.2", [34], [-1.0], 8)], [whole])
    worker = worker_of(GoesOn())
    journals = (str(tmp_path / "older"), str(tmp_path / "newer"))
    task = RolloutTask("train", np.array([0]), np.array([5]), 3, sampling, 1, journals=journals)
    ended: list[None] = []
    made = worker.run(task, RequestCallbacks(lambda: None, lambda: ended.append(None)))
    assert made is not None
    buffers, scalars = made
    assert [request.request_id for request in submitted] == ["train.5.0", "train.5.2"]
    assert buffers.tokens.tolist() == [1, 9, 31, 40, 1, 9, 32, 33, 1, 9, 40]
    assert buffers.versions.tolist() == [8, 8, 7, 8, 8]
    assert buffers.logp_rollout.tolist() == [0, 0, -0.25, -1, 0]
    assert scalars.tokens_taken_over == 3
    assert len(ended) == 3
    (kept,) = read_journal(tmp_path / "own").values()
    assert (kept.seed, kept.finish_reason, kept.completion.request_id) == (seeds[1], "stop", "train.5.1")
    assert (kept.completion.token_ids.tolist(), kept.completion.versions.tolist()) == ([32, 33], [7, 8])


def journaled(path: Path, *tasks: tuple[RolloutTask, int]) -> list[list[Attempt]]:
    """Write a journal in which every attempt of each task has sampled one token, and return the attempts."""
    worker, journal, attempts = worker_of(BackwardsEngine()), TokenJournal(path), []
    for task, token in tasks:
        attempts.append(worker._attempts(task))
        journal.begin([attempt.request for attempt in attempts[-1]])
        journal.add([Delta(attempt.request.request_id, [token], [-0.5], 7) for attempt in attempts[-1]], [])
    return attempts


def test_worker_greedy_baseline_is_not_mixed_up(tmp_path: Path) -> None:
    """Both have the same seed; one engine had sampled the greedy ones last."""
    path = tmp_path / "journal"
    sampled = RolloutTask("train", np.array([0]), np.array([5]), 2, SamplingOptions(4), 1, journals=(str(path),))
    greedy = replace(sampled, samples_per_prompt=1, sampling=SamplingOptions(4, temperature=0.0))
    attempts = journaled(path, (sampled, 31), (greedy, 32))
    found = [[*_recovered_responses(task, of).values()] for task, of in zip((sampled, greedy), attempts, strict=True)]
    assert [[r.completion.token_ids.tolist() for r in of_task] for of_task in found] == [[[31], [31]], [[32]]]
    assert attempts[0][0].request.seed == attempts[1][0].request.seed


def test_worker_ignores_responses_of_older_tasks(tmp_path: Path) -> None:
    """Validation uses the same ids and seeds again, possibly before a lost engine could release the earlier
    responses."""
    path = tmp_path / "journal"
    task = RolloutTask("train", np.array([0]), np.array([5]), 2, SamplingOptions(4), 1, journals=(str(path),))
    attempts = worker_of(BackwardsEngine())._attempts(task)
    journal = TokenJournal(path)
    journal.begin([attempt.request for attempt in attempts])
    journal.add([Delta("train.5.0", [31], [-0.5], 7)], [])
    journal.add([Delta(f"train.5.{i}", [32], [-0.5], 8) for i in range(2)], [])
    for since, found in ((7, ["train.5.0", "train.5.1"]), (8, ["train.5.1"])):
        assert [*_recovered_responses(replace(task, version=since), attempts)] == found


def test_worker_withdrawn_responses_are_omitted(tmp_path: Path) -> None:
    """The last three responses of three groups of two are withdrawn; together with the rest they equal one worker's
    result."""

    class Withdrawing(BackwardsEngine):
        def __init__(self, withdrawn: Sequence[str]) -> None:
            self.withdrawn = withdrawn

        def generate(self, requests: Sequence[GenerationRequest], on_finish: Finish, begun: Callable[[], None]) -> None:
            nothing = np.zeros(0, np.int32)
            for request in requests:
                if request.request_id in self.withdrawn:
                    logp = nothing.astype(np.float32)
                    on_finish(Completion(request.request_id, nothing, logp, "abort", nothing))
            super().generate([r for r in requests if r.request_id not in self.withdrawn], on_finish, begun)

    whole = RolloutTask(
        "train", np.array([2, 0, 3]), np.array([10, 11, 12]), 2, SamplingOptions(4), 1, str(tmp_path / "whole")
    )
    ids = [whole.request_id(response) for response in range(6)]
    assert ids == ["train.10.0", "train.10.1", "train.11.0", "train.11.1", "train.12.0", "train.12.1"]

    def run(task: RolloutTask, withdrawn: Sequence[str] = ()) -> Any:
        return worker_of(Withdrawing(withdrawn)).run(task)

    buffers, scalars = run(whole)
    first = run(replace(whole, records=str(tmp_path / "first")), ids[3:])
    rest = run(replace(whole, records=str(tmp_path / "rest"), responses=(3, 6)))
    joined = join_rows([first[0], rest[0]])
    for field in fields(joined):
        np.testing.assert_array_equal(getattr(joined, field.name), getattr(buffers, field.name))
    together = join_scalars([first[1], rest[1]])
    for name in ("group_ids", "prompt_rows", "response_tokens", "total_tokens", "rewards", "clipped", "versions"):
        np.testing.assert_array_equal(getattr(together, name), getattr(scalars, name))
    assert together.errors == scalars.errors
    records = [(tmp_path / name).read_text() for name in ("first", "rest", "whole")]
    assert records[0] + records[1] == records[2]
    assert run(replace(whole, records=None, responses=(3, 6)), ids[3:]) is None
