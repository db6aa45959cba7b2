"""`mcore-rl plan` for DeepSeek-V3 671B on 512 GPUs, and for the recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mcore_rl import cli
from tests.tiny_models import tiny_fields

CONFIGS = Path(__file__).parents[2] / "configs"
SGLANG = [f"sglang/{path.name}" for path in sorted((CONFIGS / "sglang").glob("*.yaml"))]
"""Files that are given after the recipe of the same name."""
ON_DEMAND = {
    *SGLANG,
    *(f"deepseek_v3_{gpus}_gpus.yaml" for gpus in (96, 128, 512)),
    *("dapo_full_deepseek_v3_671b.yaml", "kimi_k2.yaml", "qwen3_235b_a22b.yaml"),
    *("deepseek_v3_async.yaml", "qwen3_235b_a22b_async.yaml", "qwen3_5_397b_a17b.yaml"),
}
"""Recipes that take ten seconds each; the other recipes cover all of their features."""
RECIPE = "configs/dapo_deepseek_v3_671b.yaml"
RECIPES = sorted({path.name for path in CONFIGS.glob("*.yaml")} - {Path(RECIPE).name}) + SGLANG
SMALL_RECIPE = "configs/qwen3_30b_a3b.yaml"
GIB = 2**30


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return code, json.loads(lines[-1]) if "--json" in arguments and lines else {}, captured.out + captured.err


def test_plan_of_671b_run_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, _ = run(capsys, RECIPE, "--json")
    assert code == 0
    assert plan["cannot_run"] == []
    assert plan["fits"] is True
    assert plan["errors"] == []
    assert plan["world_size"] == len(plan["per_rank"]) == 512
    assert plan["parameters_total"] == pytest.approx(671.03e9, rel=1e-4)
    state = {entry["rank"]: entry["state_bytes"] / GIB for entry in plan["per_rank"]}
    assert sorted(state) == list(range(512))
    # Parameters of Megatron's model on the first stage, the fourteen middle stages, and the last stage.
    assert state[0] == pytest.approx(15.895, abs=1e-2)
    assert state[32] == state[479] == max(state.values()) == pytest.approx(29.158, abs=1e-2)
    assert state[511] == pytest.approx(20.081, abs=1e-2)
    assert all(entry["peak_bytes"] >= entry["state_bytes"] for entry in plan["per_rank"])
    peaks = [entry["peak_bytes"] for entry in plan["per_rank"]]
    assert peaks[plan["fullest_rank"]] == max(peaks)
    assert all(entry["activation_bytes"] > 0 for entry in plan["per_rank"])
    sync = plan["weight_sync"]
    # 43.9 GB: experts and heads divided by 32, replicated weights whole.
    assert sync["floor_bytes_per_engine_rank"] == pytest.approx(43.94e9, rel=1e-3)
    assert sync["floor_bytes_per_engine_rank"] <= sync["bytes_per_engine_rank"]
    assert sync["bytes_per_engine_rank"] <= 1.05 * sync["floor_bytes_per_engine_rank"]
    # On 64 hosts, almost nothing that a rank needs is on its own host.
    assert 0.9 * sync["total_bytes"] < sync["bytes_crossing_hosts"] < sync["total_bytes"]
    assert sync["busiest_sender_bytes"] < 1.2 * sync["total_bytes"] / 512
    assert sync["buckets"] == pytest.approx(sync["bytes_per_engine_rank"] / 2**28, rel=0.05)
    assert (sync["transport"], sync["seconds"]) == ("cuda_ipc", None)


def test_plan_with_too_little_memory_names_key_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, _ = run(capsys, SMALL_RECIPE, "cluster.gpu_memory_gib=10", "--json")
    assert code == 1
    assert plan["fits"] is False
    assert any(error.startswith("cluster.gpu_memory_gib=10") and "set actor." in error for error in plan["errors"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor.parallel.pp=7", "actor.parallel.pp=7"),
        ("actor.parallel.ep=48", "actor.parallel.ep=48"),
        ("actor.parallel.tp=3", "actor.parallel.tp=3"),
        ("actor.optimizer.cpu_offload=true", "actor.offload.optimizer"),
    ],
)
def test_plan_with_invalid_layout_exits_2(capsys: pytest.CaptureFixture[str], override: str, key: str) -> None:
    code, _, output = run(capsys, RECIPE, override)
    assert code == 2
    assert key in output
    assert "Traceback" not in output


def test_plan_table_equals_json(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("actor.parallel.tp=2", "cluster.gpus_per_node=4", "cluster.nodes=4", "cluster.gpu_memory_gib=0.5")
    code, _, output = run(capsys, SMALL_RECIPE, *overrides)
    assert code == 1
    assert "30.53 billion" in output
    assert "cluster.gpu_memory_gib=0.5" in " ".join(output.split())
    assert "does not fit" in output


def test_plan_of_fsdp2_names_gathered_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """An update holds three layers, embedding and head in bfloat16, and gradients of the latter and of one layer."""
    settings = ("parallel.ep=1", "optimizer.cpu_offload=false", "offload.grads=false")
    _, _, output = run(capsys, SMALL_RECIPE, "actor.strategy=fsdp2", *(f"actor.{each}" for each in settings))
    experts, rest_of_layer, outside = 128 * 3 * 768 * 2048, 19_140_864, 2 * 151_936 * 2048 + 2048
    layer = experts + rest_of_layer
    num_bytes = 2 * (outside + 3 * layer) + 2 * outside + (2 + 2 * 4) * layer
    shown = re.search(r"gathered layers, with all experts\W+([\d.]+) GiB", output)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(num_bytes / 2**30, abs=0.06)


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.on_demand] * (name in ON_DEMAND)) for name in RECIPES]
)
def test_plan_of_recipes_fits(capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path) -> None:
    # `make demo` creates the demos' models, with experts except for these.
    model = ["model.hf_path=configs/models/gsm8k_tiny"] if recipe.startswith("demo_") else []
    if recipe == "demo_distill_cpu.yaml":
        model += ["teacher.hf_path=configs/models/gsm8k_tiny", "teacher.in_advantage=1"]
    kind = {"demo_fsdp2_cpu.yaml": "qwen3", "demo_see_cpu.yaml": "qwen3_vl"}.get(recipe)
    if kind is not None:
        (tmp_path / "config.json").write_text(json.dumps(tiny_fields(kind)))
        model = [f"model.hf_path={tmp_path}"]
    files = [f"configs/{name}" for name in dict.fromkeys((Path(recipe).name, recipe))]
    code, plan, output = run(capsys, *files, *model, "--json")
    assert code == 0, plan.get("errors") or output
    assert plan["fits"] is True
    assert (plan["asynchronous"] is not None) == ("_async" in recipe)
    if recipe.endswith("_async.yaml"):
        overlap = plan["asynchronous"]
        assert max(overlap["trainer_idle_fraction"], overlap["generator_idle_fraction"]) <= 0.25
        assert overlap["balanced_overrides"] == []
        assert 0 < overlap["swap_seconds"] < 0.05 * overlap["step_seconds"]


def test_plan_suggests_other_division_of_waiting_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "configs/qwen3_30b_a3b_async.yaml"
    _, plan, _ = run(capsys, recipe, "rollout.nodes=4", "rollout.num_engines=8", "--json")
    overlap = plan["asynchronous"]
    assert (overlap["engine_gpus"], overlap["trainer_gpus"]) == (32, 16)
    assert overlap["generator_idle_fraction"] > 0.5
    assert (overlap["balanced_engine_gpus"], overlap["balanced_trainer_gpus"]) == (8, 40)
    code, plan, _ = run(capsys, recipe, *overlap["balanced_overrides"], "--json")
    assert code == 0
    assert plan["asynchronous"]["step_seconds"] == pytest.approx(overlap["balanced_step_seconds"], rel=0.01)
    # The table shows this too and, for a synchronous run, the possible gain.
    _, _, output = run(capsys, recipe)
    assert f"{plan['asynchronous']['step_seconds']:.1f} s: generate" in output
    assert "1.0 on average, at most 2 versions" in output
    _, _, output = run(capsys, recipe, "rollout.max_staleness=0", "rollout.max_staleness_hard=null")
    assert "rollout.max_staleness=1 takes 874.6 s per step instead of" in " ".join(output.split())


@pytest.mark.on_demand  # the README's command also searches layouts
def test_plan_suggests_layouts_for_deepseek_v3_on_128_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("cluster.nodes=16", "cluster.gpu_memory_gib=80", "--suggest", "--json")
    code, found, _ = run(capsys, RECIPE, *arguments)
    assert code == 0
    best = found["suggestions"][0]
    assert best["exact"]
    # 18 bytes of state per parameter are 88 GiB per GPU: something must be offloaded.
    assert "actor.optimizer.cpu_offload=true" in best["overrides"]
    assert any("host memory per node" in loss for loss in best["gives_up"])
    code, plan, output = run(capsys, RECIPE, *arguments[:2], *best["overrides"], "--json")
    assert code == 0, output
    assert max(entry["peak_bytes"] for entry in plan["per_rank"]) == best["peak_bytes"] < 80 * GIB


def test_plan_table_marks_what_fits_but_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, output = run(capsys, SMALL_RECIPE, "actor.moe.router_replay=engine")
    assert code == 3
    assert "cannot run yet: actor.moe.router_replay=engine: vLLM returns no experts" in " ".join(output.split())
    assert output.rstrip().endswith("fits, cannot run yet")


@pytest.mark.parametrize("extra", [[], ["actor.lora.rank=4"], ["actor.parallel.pp=2"]], ids=["all", "lora", "pp2"])
def test_plan_of_reward_model_has_a_value_head(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, extra: list[str]
) -> None:
    fields = tiny_fields("qwen3", tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    pairs = [f"model.hf_path={tmp_path}", "trainer.prompts_per_step=8", "trainer.prompts_per_update=8", *extra]
    given = [
        "configs/demo_dpo_cpu.yaml",
        *pairs,
        "preference.beta=0.1",
        "plan.peak_tflops=1",
        "actor.parallel.ep=1",
        "--json",
    ]
    dpo = run(capsys, *given, "preference.reference_free=true")[1]
    code, plan, text = run(capsys, *given, "trainer.objective=reward_model")
    assert code == 0, text
    vocabulary, hidden = fields["vocab_size"], fields["hidden_size"]
    assert plan["parameters_total"] == dpo["parameters_total"] - (vocabulary - 1) * hidden
    assert plan["engines"] == 0
    last = plan["activations_by_stage"][-1]
    assert "logits" not in last
    assert last["values"] > 0
    # Both have a forward pass before the update; only DPO multiplies by the output projection.
    assert 0 < plan["flops"]["logp"] < dpo["flops"]["logp"]
    assert plan["flops"]["update"] < dpo["flops"]["update"]
    if extra != ["actor.lora.rank=4"]:
        # The first update has no pass of its own for old log-probabilities.
        assert plan["flops"]["update"] == pytest.approx(3 * plan["flops"]["logp"])


def test_plan_of_sglang_fits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("rollout.engine=sglang", "rollout.expert_parallel=true", "rollout.data_parallel_attention=true")
    code, plan, output = run(capsys, SMALL_RECIPE, *keys, "--json")
    assert code == 0, output
    assert plan["cannot_run"] == []
    assert (plan["engine"]["graphs_bytes"], plan["engine"]["request_ranks"]) == (4 * GIB, 4)
    # The planned slices of a rank are all that it holds.
    assert plan["engine"]["weights_bytes"] == plan["weight_sync"]["floor_bytes_per_engine_rank"]


def test_slurm_with_job_that_does_not_fit_renders_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    words = [SMALL_RECIPE, "model.random_init=true", f"data.train={tmp_path}/t.jsonl", "data.val=null"]
    assert cli.main(["slurm", *words]) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash")
    assert cli.main(["slurm", *words, "cluster.gpu_memory_gib=10"]) == 2
    printed = capsys.readouterr()
    assert "cluster.gpu_memory_gib=10 is too little" in printed.err
    assert printed.out == ""
    assert cli.main(["slurm", *words, "actor.parallel.ep=48"]) == 2
