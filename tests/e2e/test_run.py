"""A complete run: the files in its directory, and equality of engine and trainer weights."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.weights.transports.files.run_files import RECORD
from tests.e2e.runs import ALPHABET, ONE_RANK, assert_greedy_responses, assert_same_records, metrics, records_of, train
from tests.e2e.test_files_run import through_files
from tests.tiny_models import add_mtp_layer, write_tiny_model

pytestmark = pytest.mark.slow

PROMISED = """step reward/mean response_tokens/mean response_tokens/clipped_fraction groups/dropped actor/loss
    actor/grad_norm actor/entropy actor/clip_fraction actor/ppo_kl rollout/logp_diff_mean rollout/logp_diff_max
    rollout/version time/generate time/reward time/logp time/update time/weight_sync time/step
    throughput/tokens_per_second""".split()


def test_every_step_has_the_promised_figures(whole_run: Path) -> None:
    rows = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "val/accuracy" in row] == [0, 2, 4]
    for row in rows[1:]:
        assert not [key for key in PROMISED if not isinstance(row.get(key), int | float)]


def test_the_policy_that_generated_is_the_policy_that_is_trained(whole_run: Path) -> None:
    for step, row in metrics(whole_run).items():
        if step:
            assert row["rollout/version"] == step - 1
            assert row["rollout/logp_diff_max"] < 1e-4  # float32 on both sides; a stale or wrong weight gives 0.01


def test_weights_move_and_the_second_update_sees_another_policy(whole_run: Path) -> None:
    last = metrics(whole_run)[4]
    assert last["actor/grad_norm"] > 0
    assert abs(last["actor/ppo_kl"]) > 1e-7  # with one update per batch, the ratio would stay 1


def test_verification_compared_every_tensor_of_the_checkpoint(whole_run: Path) -> None:
    from safetensors import safe_open

    with safe_open(whole_run.parent / "exported" / "model.safetensors", "pt") as exported:
        assert metrics(whole_run)[4]["weights/tensors_verified"] == len(exported.keys())


def test_greedy_responses_after_last_sync_equal_transformers_on_export(whole_run: Path) -> None:
    assert_greedy_responses(whole_run, 4, whole_run.parent / "exported")


def test_gap_of_engines_and_trainer_is_measured_before_step_1(whole_run: Path) -> None:
    """In float32 it is rounding: not 0, as from a comparison of equal numbers, and far below the limit."""
    before_step_1 = (whole_run.parent / "whole.log").read_text().partition("step 0/4")[0]
    gap = re.search(r"rollout engine 0 and trainer differ by (\S+) nats", before_step_1)
    assert gap is not None
    assert 1e-12 < float(gap[1]) < 1e-4


def test_rollouts_hold_one_object_per_response(whole_run: Path) -> None:
    row = metrics(whole_run)[3]
    records = records_of(whole_run, "step_3")
    assert len(records) == 4 * row["groups/drawn"]
    assert {record["version"] for record in records} == {2}
    assert {"prompt", "response", "reward", "tokens", "group", "version"} <= set(records[0])
    assert sum(r["reward"] for r in records) / len(records) == pytest.approx(row["reward/mean"], rel=1e-5)


@pytest.mark.parametrize("step", [1, 4])
def test_token_values_belong_to_recorded_responses(whole_run: Path, step: int) -> None:
    lines = [(whole_run / folder / f"step_{step}.jsonl").read_text().splitlines() for folder in ("rollouts", "tokens")]
    recorded, values = ({record["digest"]: record for record in map(json.loads, part)} for part in lines)
    assert values
    for digest, tokens in values.items():
        assert len(tokens["token_ids"]) == len(tokens["logp_policy"]) == recorded[digest]["tokens"]
        assert tokens["logp_policy"] == pytest.approx(tokens["logp_rollout"], abs=1e-4)  # float32 on both sides


def test_the_run_directory_is_complete(whole_run: Path) -> None:
    names = {path.name for path in whole_run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "rollouts", "timeline.json", "checkpoints", "tensorboard"} <= names
    assert {"report.html", "tokens"} <= names
    assert load_config(str(whole_run / "config.yaml")).run.dir == str(whole_run)
    assert sorted(path.name for path in (whole_run / "checkpoints").iterdir()) == ["step_2", "step_4"]
    assert not list(whole_run.rglob("*.partial"))
    events = json.loads((whole_run / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert tracks == {"driver", "trainer rank 0", "trainer rank 1", "rollout engine 0"}


def test_run_removes_temporary_files_of_engines_and_compilers(whole_run: Path) -> None:
    assert not list((whole_run.parent / "temporary").iterdir())


def test_the_table_at_the_end_compares_accuracy(whole_run: Path) -> None:
    output = (whole_run.parent / "whole.log").read_text()
    assert "validation accuracy" in output
    assert "Traceback" not in output


def test_eval_repeats_the_last_validation_by_set_and_changes_no_metrics(
    whole_run: Path, task: Path, tmp_path: Path
) -> None:
    before = (whole_run / "metrics.jsonl").read_text()
    lines = (task.parent / "val.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(lines[:6]))
    (tmp_path / "rest.jsonl").write_text("".join(lines[6:]))
    sets = f"data.val={{some: {tmp_path}/some.jsonl, rest: {tmp_path}/rest.jsonl}}"
    records = records_of(whole_run, "val_step_4")
    command = [sys.executable, "-m", "mcore_rl.cli", "eval", str(task), f"run.dir={whole_run}", sets, *ONE_RANK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    accuracy = metrics(whole_run)[4]["val/accuracy"]
    some, rest = (sum(r["accuracy"] for r in part) / len(part) for part in (records[:6], records[6:]))
    assert done.stdout.splitlines() == [
        f"step 4: accuracy {accuracy:.4f} over 16 prompts",
        f"  some: accuracy {some:.4f} over 6 prompts",
        f"  rest: accuracy {rest:.4f} over 10 prompts",
    ]
    assert (whole_run / "metrics.jsonl").read_text() == before


@pytest.mark.on_demand
def test_run_with_drafts_equals_one_without(whole_run: Path, task: Path, tmp_path: Path) -> None:
    train(task, tmp_path / "run", "rollout.draft=ngram", "rollout.draft_below=300")
    assert_same_records(tmp_path / "run", whole_run)
    rows = metrics(tmp_path / "run")
    drafts = [{key: row.pop(key) for key in list(row) if key.startswith("engine/draft_")} for row in rows.values()]
    assert sum(each["engine/draft_tokens"] for each in drafts[1:]) > 0
    assert rows == metrics(whole_run)


@pytest.fixture(scope="module")
def sharded_run(whole_run: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the run, repeated from the checkpoint of step 2 with sharded parameters and weights that travel
    through files in `weights` beside it; certifies every sync."""
    sharded = tmp_path_factory.mktemp("sharded") / "run"
    files = through_files(sharded.parent / "weights", "weights.verify_every=1")
    shutil.copytree(whole_run, sharded)
    shutil.rmtree(sharded / "checkpoints" / "step_4")
    train(task, sharded, "actor.parallel.shard_parameters=true", *files)
    return sharded


def test_run_through_files_leaves_no_files(sharded_run: Path) -> None:
    assert not list((sharded_run.parent / "weights").rglob("*"))
    assert not (sharded_run / RECORD).exists()


def test_run_resumed_with_sharded_parameters_equals_replicated_run(whole_run: Path, sharded_run: Path) -> None:
    """Sums have another order, so the metrics differ by rounding; a wrong row of a weight would change every
    response."""
    found, expected = metrics(sharded_run), metrics(whole_run)
    verified = expected[4]["weights/tensors_verified"]
    assert [found[step].pop("weights/tensors_verified") for step in (3, 4)] == [verified, verified]
    for step in (3, 4):
        ours, theirs = (
            {r["digest"]: (r["response"], r["version"]) for r in records_of(run, f"step_{step}")}
            for run in (sharded_run, whole_run)
        )
        assert ours == theirs
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), name
    assert found[4]["val/accuracy"] == expected[4]["val/accuracy"]


@pytest.mark.on_demand
def test_run_with_drafts_of_trained_layers_equals_one_without(task: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    model = write_tiny_model(tmp_path / "model", "glm4_moe", std=0.06, vocab_size=len(ALPHABET) + 3, head_dim=32)
    add_mtp_layer(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(task.parent / "model" / name, model)
    common = (f"model.hf_path={model}", "actor.mtp_loss_coefficient=0.1", "trainer.steps=2")
    train(task, tmp_path / "plain", *common)
    train(task, tmp_path / "drafts", *common, "rollout.draft=mtp", "rollout.draft_below=300")
    assert_same_records(tmp_path / "drafts", tmp_path / "plain")
    plain, drafts = metrics(tmp_path / "plain")[2], metrics(tmp_path / "drafts")[2]
    assert drafts["engine/draft_tokens"] > 0
    with safe_open(model / "model.safetensors", "pt") as stored:
        layer = [name for name in stored.keys() if name.startswith("model.layers.4.")]  # noqa: SIM118
    shared = [name for name in layer if "embed_tokens" in name or "shared_head.head" in name]
    assert drafts["weights/tensors_verified"] - plain["weights/tensors_verified"] == len(layer) - len(shared) > 20


@pytest.fixture(scope="module")
def longer_run(sharded_run: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the finished run, continued by a step in another layout, without shards, with a profile of rank
    1. Beside it: the output `longer.log`."""
    longer = tmp_path_factory.mktemp("longer") / "run"
    shutil.copytree(sharded_run, longer)
    validation = ("rollout.validation_temperature=1", "rollout.validation_samples=3")
    replay = ("actor.moe.router_replay=engine", "actor.moe.replay_check_every_steps=1", "trainer.prompts_per_update=8")
    profile = ("observe.profile.steps=[5]", "observe.profile.ranks=[1]")
    log = train(task, longer, "trainer.steps=5", "actor.parallel.tp=2", *validation, *replay, *profile)
    (longer.parent / "longer.log").write_text(log)
    return longer


@pytest.mark.on_demand  # tests/distributed/test_resharding.py resumes in other layouts
def test_finished_run_with_more_steps_resumes_in_another_layout(
    sharded_run: Path, task: Path, longer_run: Path
) -> None:
    after, before = metrics(longer_run), metrics(sharded_run)
    assert {step: after[step] for step in before} == before
    # From two data-parallel ranks to one: batches are split differently, but training continues with the next prompts.
    proofs = [
        json.loads((longer_run / "checkpoints" / f"step_{step}" / "complete.json").read_text()) for step in (4, 5)
    ]
    assert [(proof["layout"]["tp"], proof["layout"]["ep"]) for proof in proofs] == [(1, 2), (2, 2)]
    sampler = PromptSampler(64, 3, True)
    state = json.loads((sharded_run / "checkpoints" / "step_4" / "state.json").read_text())
    sampler.load_state_dict(state["positions"]["sampler"])
    rows = (task.parent / "train.jsonl").read_text().splitlines()
    expected = {json.loads(rows[row])["prompt"] for row in sampler.draw(8)}
    assert expected <= {record["prompt"] for record in records_of(longer_run, "step_5")}
    # Validation samples three responses per prompt.
    records = records_of(longer_run, "val_step_5")
    assert [(r["group"], r["sample"]) for r in records] == [
        (group, sample) for group in range(16) for sample in range(3)
    ]
    assert after[5]["val/accuracy"] == pytest.approx(sum(r["accuracy"] for r in records) / 48)
    assert len({r["response"] for r in records[:3]}) > 1
    assert after[5]["rollout/version"] == 4
    # In float32, engine and trainer choose the same experts, except for near ties; a shift by one token would differ.
    assert after[5]["routing/differing_tokens"] < 0.05
    assert after[5]["routing/logp_diff_mean_without_replay"] < 1e-4
    assert after[5]["rollout/logp_diff_max"] < 1e-4


@pytest.mark.on_demand  # tests/unit/runtime/test_profiles.py; this test needs the run of the one before
def test_profiled_step_has_a_trace_of_the_chosen_rank_only(longer_run: Path) -> None:
    assert f"profiles of step 5: {longer_run / 'profile'}" in (longer_run.parent / "longer.log").read_text()
    (trace,) = (longer_run / "profile").iterdir()
    assert trace.name == "step_5_rank_1.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    # A span of the rank, and operators of its passes.
    assert {"update", "aten::matmul"} <= names
