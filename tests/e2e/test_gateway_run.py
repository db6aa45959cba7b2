"""A run whose episodes are programs behind the gateway, on a real engine, against the same calls as coroutines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.runs import ENGINE, ONE_RANK, TrainProcess, metrics, records_of, train
from tests.e2e.test_engine_loss import engine_of, suspend_in_midst_of_responses

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
MORE = {"role": "user", "content": "12"}
"""Message after the first turn."""
PROGRAMS = '''
import functools

from openai import AsyncOpenAI

MORE = {"role": "user", "content": "12"}


async def agent(row, base_url, api_key):
    """Two turns; every second row also tries the first turn again."""
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0)
    messages = row["messages"]

    async def ask(messages, **options):
        return await client.chat.completions.create(model="any", messages=messages, **options)

    first = await ask(messages, max_tokens=4)
    second = await ask([*messages, first.choices[0].message.model_dump(exclude_none=True), MORE])
    if row["row"] % 2:
        await ask(messages, max_tokens=3)
    return {"score": second.usage.completion_tokens / 8, "id": first.id}


class Solver:
    """The same calls as a coroutine."""

    async def run(self, session, prompt):
        first = await session.generate(prompt.token_ids, {"max_response_tokens": 4})
        second = await session.generate(session.next_prompt([MORE]))
        if prompt.row % 2:
            await session.generate(prompt.token_ids, {"max_response_tokens": 3})
        return {"score": len(second.token_ids) / 8}
'''


@pytest.fixture(scope="module")
def keys(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides of both runs."""
    directory = tmp_path_factory.mktemp("gateway")
    (directory / "mine.py").write_text(PROGRAMS)
    tokenizer = directory / "tokenizer"
    model = Path(yaml.safe_load(task.read_text())["model"]["hf_path"])
    shutil.copytree(model, tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    return (
        *ONE_RANK,
        f"model.tokenizer_path={tokenizer}",
        "data.template=auto",
        "algorithm.dynamic_sampling.enable=false",
        "reward.overlong.enable=false",
        "trainer.steps=2",
        "checkpoint.every_steps=1",
        "trainer.validate_every_steps=0",
        "trainer.validate_before=false",
    )


@pytest.fixture(scope="module")
def programs(keys: tuple[str, ...]) -> str:
    path = next(key for key in keys if key.startswith("model.tokenizer_path=")).partition("=")[2]
    return str(Path(path).parent / "mine.py")


def kill_driver_amid_programs(run: TrainProcess, step: int, engine: psutil.Process, at_latest: int) -> None:
    """Kill the driver when the checkpoint of `step` is complete and programs of a later step wait for replies.

    Asynchronous runs may have all responses of the next step by then, therefore `at_latest` is the last step that they
    may be in.
    """
    run.wait_until((run.run_dir / "checkpoints" / f"step_{step}" / "complete.json").exists)
    suspend_in_midst_of_responses(run, engine, step=1)
    assert not (run.run_dir / "rollouts" / f"step_{at_latest}.jsonl").exists()
    run.process.kill()
    run.process.wait()
    engine.resume()
    assert not run.left_after(30)


@pytest.fixture(scope="module")
def gateway_run(task: Path, keys: tuple[str, ...], programs: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run whose engine is killed in step 1 and whose driver is killed in step 2, both while programs
    wait for replies."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    overrides = (*keys, "rollout.episode=gateway", f"rollout.harness={programs}:agent")
    with TrainProcess(task, run_dir, overrides) as run:
        engine = engine_of(run)
        run.wait_until((run_dir / "gateways.json").exists)
        assert (run_dir / "gateways.json").stat().st_mode & 0o77 == 0
        suspend_in_midst_of_responses(run, engine, step=1)
        engine.kill()
        (other,) = run.wait_until(lambda: [found for found in run.processes(ENGINE) if found.pid != engine.pid])
        kill_driver_amid_programs(run, 1, other, at_latest=2)
    train(task, run_dir, *overrides)
    assert not (run_dir / "gateways.json").exists()
    return run_dir


def assert_equal_records(gateway_run: Path, native: Path, step: int) -> None:
    """Check that the records of a step are equal, except for fields of the gateway."""
    found, expected = (records_of(run_dir, f"step_{step}") for run_dir in (gateway_run, native))
    for record, other in zip(found, expected, strict=True):
        assert record.pop("gateway_rewritten") == record.pop("gateway_missed") == 0
        assert record.pop("gateway_requests") == record["turns"]
        if record["turns"] > 2:  # the gateway records the conversation of the last request, which is a branch
            record["messages"] = other["messages"]
    assert found == expected


def test_programs_are_trained_as_the_same_coroutines(
    task: Path, keys: tuple[str, ...], programs: str, gateway_run: Path, tmp_path: Path
) -> None:
    """Tokens, masks, log-probabilities, versions and rewards are equal, though the engine and then the driver were
    killed."""
    native = tmp_path / "native"
    train(task, native, *keys, f"rollout.episode={programs}:Solver")
    assert sum(row["engine/restarts"] for row in metrics(gateway_run).values()) == 1
    for step, row in metrics(native).items():
        assert_equal_records(gateway_run, native, step)
        assert metrics(gateway_run)[step]["actor/grad_norm"] == row["actor/grad_norm"]
        assert row["rollout/logp_diff_max"] < 1e-4


def test_records_of_programs_have_their_branches(gateway_run: Path) -> None:
    by_response: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in records_of(gateway_run, "step_1"):
        by_response.setdefault((record["group"], record["sample"]), []).append(record)
    assert {len(sequences) for sequences in by_response.values()} == {1, 2}
    for sequences in by_response.values():
        assert sequences[0]["turns"] == len(sequences) + 1
        assert all(record["reward"] == sequences[0]["reward"] for record in sequences)
    shown = json.dumps(records_of(gateway_run, "step_1")[0]["messages"])
    assert '"assistant"' in shown


@pytest.mark.on_demand  # gateway_run resumes too
@pytest.mark.parametrize("swap", ["finish", "recompute"])
def test_asynchronous_programs_resume_amid_their_sessions(
    task: Path, keys: tuple[str, ...], programs: str, tmp_path: Path, swap: str
) -> None:
    """With swap=finish, results do not depend on timing: the resumed run equals the run of coroutines. Otherwise, each
    response is trained once."""
    ahead = (
        *("cluster.placement=disaggregated", "actor.num_ranks=1", "cluster.gpus_per_node=2", "trainer.steps=4"),
        *("rollout.max_staleness=1", f"rollout.swap={swap}", "rollout.max_response_tokens=24"),
        *(("rollout.max_staleness_hard=1",) if swap == "finish" else ("algorithm.policy_loss.name=decoupled_ppo",)),
    )
    run_dir, native = tmp_path / "run", tmp_path / "native"
    overrides = (*keys, *ahead, "rollout.episode=gateway", f"rollout.harness={programs}:agent")
    with TrainProcess(task, run_dir, overrides) as run:
        kill_driver_amid_programs(run, 2, engine_of(run), at_latest=4)
    train(task, run_dir, *overrides)
    assert sorted(step for step in metrics(run_dir) if step) == [1, 2, 3, 4]
    if swap == "recompute":
        responses = [
            {(record["group"], record["sample"]) for record in records_of(run_dir, f"step_{step}")}
            for step in range(1, 5)
        ]
        assert sum(map(len, responses)) == len(set().union(*responses)) == 4 * 4 * 8
        return
    train(task, native, *keys, *ahead, f"rollout.episode={programs}:Solver")
    for step in range(1, 5):
        assert_equal_records(run_dir, native, step)
