"""Tasks of Inspect and of lm-evaluation-harness against the gateway, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.rollout.connectors.client import Endpoint
from mcore_rl.rollout.gateway.harness.function import FunctionHarness
from mcore_rl.types import EpisodeOutcome
from tests.selection import needs_package
from tests.unit.rollout.connectors.written import SOLVE, rows
from tests.unit.rollout.episodes.conftest import Stage
from tests.unit.rollout.episodes.scripted import END

needs_inspect = needs_package("inspect_ai", "scripts/setup_connectors.sh")
needs_lm_eval = needs_package("lm_eval", "scripts/setup_connectors.sh")

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, accuracy, includes, scorer
from inspect_ai.solver import generate, solver, system_message, use_tools
from inspect_ai.tool import tool

SAMPLES = [Sample(input="2 + 3?", target="5"), Sample(input="1 + 1?", target="2", metadata={"n": 1})]


@tool
def look():
    async def execute(q: str):
        '''Look something up.

        Args:
            q: words
        '''
        return f"found {q}"

    return execute


@scorer(metrics=[accuracy()])
def judged():
    async def score(state, target):
        verdict = await get_model().generate("judge")
        return Score(value={"verdict": 0.25, "length": len(verdict.completion)})

    return score


@task
def plain(n=2):
    return Task(dataset=MemoryDataset(SAMPLES[:n]), solver=[system_message("Add."), generate()], scorer=includes())


@task
def with_tools():
    return Task(dataset=MemoryDataset(SAMPLES), solver=[use_tools(look()), generate()], scorer=[includes(), judged()])


@task
def unscored():
    return Task(dataset=MemoryDataset(SAMPLES))


@task
def boxed():
    return Task(dataset=MemoryDataset(SAMPLES), scorer=includes(), sandbox="docker")
"""
GENERATING = """
task: words
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["!"]
filter_list:
  - name: strict
    filter:
      - function: take_first
  - name: digits
    filter:
      - function: regex
        regex_pattern: "([0-9]+)"
      - function: take_first
metric_list:
  - metric: exact_match
"""
SHORT = GENERATING.replace("task: words", "task: short").replace(
    "generation_kwargs:", "generation_kwargs:\n  max_gen_toks: 3"
)
REPEATED = GENERATING.replace("task: words", "task: repeated\nrepeats: 4")
UNSAFE = GENERATING.replace("task: words", "task: unsafe\nunsafe_code: true")
CHOOSING = """
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["a", "b"]
doc_to_target: 0
"""

Play = Callable[..., tuple[Stage, EpisodeOutcome]]


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TASKS)
    return str(tmp_path / "mine.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """--arguments with a folder of two tasks."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "test.jsonl").write_text(
        '{"question": "2 + 3?", "answer": "5"}\n{"question": "4 + 4?", "answer": "8"}\n'
    )
    texts = {"words": GENERATING, "choices": CHOOSING, "short": SHORT, "repeated": REPEATED, "unsafe": UNSAFE}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(tmp_path / "test.jsonl")))
    return json.dumps({"include_path": str(tmp_path)})


@needs_inspect
@pytest.mark.parametrize(("said", "reward"), [("It is 5.", 1.0), ("It is 6.", 0.0)])
def test_inspect_scores_a_sample(play: Play, tasks: str, tmp_path: Path, said: str, reward: float) -> None:
    row, other = rows(tmp_path / "rows.jsonl", "inspect", f"{tasks}:plain")
    assert (row["prompt"], row["data_source"]) == ([{"role": "user", "content": "2 + 3?"}], "plain")
    assert other["reward_model"]["ground_truth"] == "2"
    say = lambda text: f"{said if '2 + 3?' in text else 'nothing'}{END}"  # noqa: E731
    stage, outcome = play(say, FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    assert outcome.reward == reward
    assert outcome.parts["score"] == reward
    assert outcome.messages[0] == {"role": "system", "content": "Add."}
    assert stage.trained_text(outcome) == f"{said}{END}"


@needs_inspect
def test_inspect_runs_tools_and_scorers_that_call_the_model(play: Play, tasks: str, tmp_path: Path) -> None:
    row, _ = rows(tmp_path / "rows.jsonl", "inspect", f"{tasks}:with_tools")
    asked = f'<tool_call>\n{{"name": "look", "arguments": {{"q": "sum"}}}}\n</tool_call>{END}'

    def say(text: str) -> str:
        if "judge" in text:
            return f"fine{END}"
        return f"It is 5.{END}" if "found sum" in text else asked

    _, outcome = play(say, FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    assert outcome.reward == 1.0
    assert {name: outcome.parts[name] for name in ("verdict_1", "length_1")} == {"verdict_1": 0.25, "length_1": 4.0}
    assert outcome.parts["gateway_requests"] == 3.0


@needs_inspect
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("unscored", "has no scorer"),
        ("boxed", "needs a sandbox of Inspect"),
        ("missing", "has no function missing"),
    ],
)
def test_unusable_inspect_tasks_are_rejected(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, message: str
) -> None:
    assert main(["rows", "inspect", f"{tasks}:{task}", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err


@needs_lm_eval
def test_lm_eval_filters_and_scores_a_document(play: Play, folder: str, tmp_path: Path) -> None:
    """The metrics are equal to `lm_eval.simple_evaluate` with a model that gives the same text."""
    row, _ = rows(tmp_path / "rows.jsonl", "lm_eval", "words", "--arguments", folder)
    assert row["prompt"] == [{"role": "user", "content": "2 + 3?"}]
    stage, outcome = play(lambda text: f"I say 5!{END}", FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    assert stage.trained_text(outcome) == "I say 5!", "the task's stop string ends the reply"
    expected = evaluated("I say 5", json.loads(folder)["include_path"])
    assert expected == {"exact_match": 0.0, "exact_match_digits": 1.0}
    assert {name: outcome.parts[name] for name in expected} == expected
    assert outcome.reward == 0.0


@needs_lm_eval
def test_lm_eval_limits_a_reply_by_its_task(play: Play, folder: str, tmp_path: Path) -> None:
    row, _ = rows(tmp_path / "rows.jsonl", "lm_eval", "short", "--arguments", folder)
    say = lambda text: f"I say 5 and more{END}"  # noqa: E731
    _, outcome = play(say, FunctionHarness(SOLVE, {}), extra_info=row["extra_info"])
    assert outcome.error is None
    assert outcome.trajectories[0].trained is not None
    assert (outcome.trajectories[0].trained > 0).sum() == 3


@needs_lm_eval
def test_lm_eval_rows_name_their_folder_for_other_processes(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row, _ = rows(tmp_path / "rows.jsonl", "lm_eval", "words", "--arguments", '{"include_path": "."}')
    assert row["extra_info"]["connector"]["include_path"] == str(tmp_path)


@needs_lm_eval
def test_lm_eval_does_not_block_the_sessions_of_others(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's code finds no event loop in its thread, both when it is loaded and when it evaluates a reply."""
    from mcore_rl.rollout.connectors import lm_eval

    threads: list[str] = []
    for name in ("_loaded", "_metrics"):
        function = getattr(lm_eval, name)
        seen = lambda *given, function=function: [threads.append(threading.current_thread().name), function(*given)][1]  # noqa: E731
        monkeypatch.setattr(lm_eval, name, seen)

    async def said(*given: object) -> str:
        return "5"

    row, _ = rows(tmp_path / "rows.jsonl", "lm_eval", "words", "--arguments", folder)
    monkeypatch.setattr(lm_eval, "reply", said)
    threads.clear()
    asyncio.run(lm_eval.LmEvalSuite().run(row["extra_info"]["connector"], Endpoint("http://127.0.0.1:1/v1", "key")))
    assert threads == ["lm_eval_0", "lm_eval_0"]


def evaluated(said: str, include: str) -> dict[str, float]:
    """Return the metrics of the first document by the library's own evaluation."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Constant(LM):
        def loglikelihood(self, requests):  # type: ignore[no-untyped-def]
            raise NotImplementedError

        def loglikelihood_rolling(self, requests):  # type: ignore[no-untyped-def]
            raise NotImplementedError

        def generate_until(self, requests):  # type: ignore[no-untyped-def]
            return [said for _ in requests]

    found = lm_eval.simple_evaluate(
        Constant(),
        tasks=["words"],
        task_manager=TaskManager(include_path=include, include_defaults=False),
        limit=1,
        bootstrap_iters=0,
    )
    results = found["results"]["words"]
    return {"exact_match": results["exact_match,strict"], "exact_match_digits": results["exact_match,digits"]}


@needs_lm_eval
@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("choices", None, "needs log-likelihoods of given texts (multiple_choice)"),
        ("repeated", None, "evaluates 4 replies to a document (repeats), and a row has one"),
        ("unsafe", None, "runs the model's code in this process (unsafe_code)"),
        ("missing", None, "cannot load the task missing"),
        ("words", '{"n": 1}', "--arguments has n; lm_eval takes include_path only"),
    ],
)
def test_unusable_lm_eval_tasks_are_rejected(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, arguments: str | None, message: str
) -> None:
    words = ("rows", "lm_eval", task, "--arguments", arguments or folder, "--out", str(tmp_path / "rows.jsonl"))
    assert main(words) == 2
    assert message in capsys.readouterr().err
