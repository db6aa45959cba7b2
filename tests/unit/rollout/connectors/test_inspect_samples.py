"""Sessions of Inspect: each has a sample of its own, within the limits of its task."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.connectors.client import Endpoint
from mcore_rl.rollout.connectors.registry import load_suite
from mcore_rl.rollout.gateway.harness.function import FunctionHarness
from mcore_rl.types import EpisodeOutcome
from tests.selection import needs_package
from tests.unit.rollout.connectors.written import SOLVE, rows
from tests.unit.rollout.episodes.conftest import Stage
from tests.unit.rollout.episodes.scripted import END

pytestmark = needs_package("inspect_ai", "scripts/setup_connectors.sh")

TASKS = """
import asyncio
import itertools

from inspect_ai import Task, task
from inspect_ai.approval import ApprovalPolicy, auto_approver
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, accuracy, includes, scorer
from inspect_ai.solver import generate, solver
from inspect_ai.util import store

LOADS = itertools.count()


@solver
def counts():
    async def solve(state, generate):
        # Each of these is 1 in a session with a sample and a store of its own.
        state.metadata["tries"].append(1)
        state.messages[0].metadata["seen"].append(1)
        store().set("times", store().get("times", 0) + 1)
        return state

    return solve


@scorer(metrics=[accuracy()])
def counted():
    async def score(state, target):
        seen = len(state.messages[0].metadata["seen"])
        return Score(value={"tries": len(state.metadata["tries"]), "seen": seen, "times": store().get("times", 0)})

    return score


@solver
def loops(slow):
    async def solve(state, generate):
        while True:
            state.messages.append(ChatMessageUser(content="again"))
            state = await generate(state)
            await asyncio.sleep(60 if slow else 0)

    return solve


@task
def counting():
    message = ChatMessageUser(content="2 + 3?", metadata={"seen": []})
    samples = [Sample(input=[message], target="5", metadata={"tries": []})]
    return Task(dataset=MemoryDataset(samples), solver=counts(), scorer=counted())


@task
def moved():
    # Each load has another order, as an unseeded shuffle has.
    samples = [Sample(input="2 + 3?", target="5"), Sample(input="1 + 1?", target="2")]
    return Task(dataset=MemoryDataset(samples[:: -1 if next(LOADS) % 2 else 1]), scorer=includes())


@task
def limited(**limits):
    samples = MemoryDataset([Sample(input="q", target="5")])
    return Task(dataset=samples, solver=loops("time_limit" in limits), scorer=includes(), **limits)


@task
def approved():
    policies = [ApprovalPolicy(auto_approver(), "*")]
    return Task(dataset=MemoryDataset([Sample(input="q", target="5")]), scorer=includes(), approval=policies)


async def leaves_a_mark(state):
    open(state.metadata["mark"], "a").write(str(state.completed))
    raise OSError("a failed cleanup changes no score")


@solver
def fails():
    async def solve(state, generate):
        raise ValueError("the solver failed")

    return solve


@task
def cleaned(mark, broken):
    sample = Sample(input="q", target="5", metadata={"mark": mark})
    steps = [fails()] if broken else [generate()]
    return Task(dataset=MemoryDataset([sample]), solver=steps, scorer=includes(), cleanup=leaves_a_mark)


@scorer(metrics=[accuracy()])
def graded():
    async def score(state, target):
        answer = await get_model(role="grader").generate("Is it right?")
        return Score(value=float(answer.completion == "by the grader"))

    return score


@task
def roles():
    made = ModelOutput.from_content("mockllm/model", "by the grader")
    made.usage = ModelUsage(input_tokens=2, output_tokens=2, total_tokens=4)  # else a tokenizer is downloaded
    grader = get_model("mockllm/model", custom_outputs=[made])
    samples = MemoryDataset([Sample(input="q", target="5")])
    return Task(dataset=samples, scorer=graded(), model_roles={"grader": grader})


@task
def stopped():
    return Task(dataset=MemoryDataset([Sample(input="q", target="5")]), scorer=includes(), early_stopping=object())


@task
def filled(**fields):
    return Task(dataset=MemoryDataset([Sample(input="q", target="5", **fields)]), scorer=includes())


@task
def odd():
    return Task(dataset=MemoryDataset([Sample(input="q", metadata={"thing": object()})]), scorer=includes())


def helper():
    raise AssertionError("a function without @task was called")
"""

SCORES = {"message_limit": 1.0, "turn_limit": 1.0, "token_limit": 0.0, "time_limit": 1.0}
"""The generation that exceeds a limit of tokens does not reach the state, so its text has no score."""

Play = Callable[..., tuple[Stage, EpisodeOutcome]]


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    (tmp_path / "kept.py").write_text(TASKS)
    return str(tmp_path / "kept.py")


def played(row: dict[str, Any]) -> dict[str, Any]:
    """Play a row whose solvers do not call the model."""
    nowhere = Endpoint("http://127.0.0.1:1/v1", "key")
    return asyncio.run(load_suite("inspect").run(row["extra_info"]["connector"], nowhere))


def test_sessions_do_not_change_samples_of_others(tasks: str, tmp_path: Path) -> None:
    (row,) = rows(tmp_path / "rows.jsonl", "inspect", f"{tasks}:counting")

    async def both() -> list[dict[str, Any]]:
        run = load_suite("inspect").run
        part, nowhere = row["extra_info"]["connector"], Endpoint("http://127.0.0.1:1/v1", "key")
        return await asyncio.gather(run(part, nowhere), run(part, nowhere))

    for found in [*asyncio.run(both()), played(row)]:
        assert found["metrics"] == {"tries": 1.0, "seen": 1.0, "times": 1.0}


def test_row_plays_its_own_sample_after_a_shuffle(play: Play, tasks: str, tmp_path: Path) -> None:
    row = rows(tmp_path / "rows.jsonl", "inspect", f"{tasks}:moved")[0]
    load_suite.cache_clear()  # another process loads the task again
    _, outcome = play(lambda text: f"5{END}", FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    assert outcome.messages[0]["content"] == row["prompt"][0]["content"]
    assert outcome.reward == float(row["reward_model"]["ground_truth"] == "5")


@pytest.mark.parametrize(
    ("limits", "requests"),
    [({"message_limit": 5}, 2.0), ({"turn_limit": 3}, 4.0), ({"token_limit": 1}, 1.0), ({"time_limit": 1}, 1.0)],
)
def test_limits_of_a_task_end_its_sample(
    play: Play, tasks: str, tmp_path: Path, limits: dict[str, int], requests: float
) -> None:
    """The solver never ends; its sample is scored at the limit, as `inspect eval` does."""
    words = ("inspect", f"{tasks}:limited", "--arguments", json.dumps(limits))
    (row,) = rows(tmp_path / "rows.jsonl", *words)
    _, outcome = play(lambda text: f"5{END}", FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    assert outcome.parts["gateway_requests"] == requests
    assert outcome.parts["score"] == SCORES[next(iter(limits))]


@pytest.mark.parametrize(("broken", "error"), [(False, None), (True, "the solver failed")])
def test_task_cleanup_runs_once_after_each_sample(
    play: Play, tasks: str, tmp_path: Path, broken: bool, error: str | None
) -> None:
    mark = tmp_path / "mark"
    words = ("inspect", f"{tasks}:cleaned", "--arguments", json.dumps({"mark": str(mark), "broken": broken}))
    (row,) = rows(tmp_path / "rows.jsonl", *words)
    _, outcome = play(lambda text: f"5{END}", FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert mark.read_text() == str(not broken)
    if error is None:
        assert (outcome.error, outcome.reward) == (None, 1.0)
    else:
        assert error in str(outcome.error)


def test_model_role_of_a_task_is_not_the_policy(play: Play, tasks: str, tmp_path: Path) -> None:
    (row,) = rows(tmp_path / "rows.jsonl", "inspect", f"{tasks}:roles")
    _, outcome = play(lambda text: f"5{END}", FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    assert (outcome.reward, outcome.parts["gateway_requests"]) == (1.0, 1.0)


@pytest.mark.on_demand
def test_scores_at_limits_are_equal_to_inspect_eval(tasks: str, tmp_path: Path) -> None:
    """Run the same tasks with `inspect_ai.eval` and its mock model."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    from mcore_rl.config.functions import load_function

    limits = {"message_limit": 5, "turn_limit": 3, "token_limit": 1, "time_limit": 1}
    for name, value in limits.items():
        task = load_function("task", f"{tasks}:limited")(**{name: value})
        made = ModelOutput.from_content("mockllm/model", "5")
        made.usage = ModelUsage(input_tokens=2, output_tokens=2, total_tokens=4)
        model = get_model("mockllm/model", custom_outputs=itertools.repeat(made))
        (log,) = evaluate(task, model=model, log_dir=str(tmp_path), display="none")
        (sample,) = log.samples
        assert sample.limit.type == name.removesuffix("_limit")
        assert {"C": 1.0, "I": 0.0}[sample.scores["includes"].value] == SCORES[name]


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("limited", {"working_limit": 9}, "needs working_limit of Inspect"),
        ("limited", {"cost_limit": 9}, "needs cost_limit of Inspect"),
        ("approved", {}, "needs approval of Inspect"),
        ("stopped", {}, "needs early_stopping of Inspect"),
        ("filled", {"setup": "true"}, "needs setup of a sample"),
        ("filled", {"files": {"a": "b"}}, "needs files of a sample"),
        ("odd", {}, "cannot be written as JSON"),
        ("helper", {}, "is no task of Inspect; decorate the function with @task"),
    ],
)
def test_tasks_with_other_features_are_rejected(
    tasks: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
    arguments: dict[str, object],
    message: str,
) -> None:
    words = ("rows", "inspect", f"{tasks}:{task}", "--arguments", json.dumps(arguments))
    assert main([*words, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_row_cannot_call_a_function_that_is_no_task(tmp_path: Path) -> None:
    target = tmp_path / "made"
    part = {"kind": "inspect", "name": "os:mkdir", "arguments": {"path": str(target)}, "number": 0}
    with pytest.raises(ConfigError, match="os:mkdir is no task of Inspect"):
        played({"extra_info": {"connector": {**part, "sample": {"input": "q"}}}})
    assert not target.exists()


def test_row_without_its_sample_is_rejected() -> None:
    part = {"kind": "inspect", "name": "mine.py:task", "arguments": {}, "sample": 0}
    with pytest.raises(DataError, match="write the rows with `mcore-rl rows inspect`"):
        played({"extra_info": {"connector": part}})


def test_sessions_leave_no_semaphores_behind(play: Play, tasks: str, tmp_path: Path) -> None:
    from inspect_ai.util import _concurrency

    words = ("inspect", f"{tasks}:limited", "--arguments", '{"turn_limit": 1}')
    (row,) = rows(tmp_path / "rows.jsonl", *words)
    _, outcome = play(lambda text: f"5{END}", FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    left = _concurrency._concurrency_registry._semaphores
    assert not [key for key in left if "OpenAICompatible" in key]
