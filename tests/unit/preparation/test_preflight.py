"""Preflight checks: errors that are reported in the first second of a run, before slow imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError
from mcore_rl.preparation.preflight import check_run, has_gpu

HEAVY = ["torch", "transformers", "vllm", "megatron", "ray", "numpy"]
HF = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF))
    (tmp_path / "t.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: {tmp_path}/t.jsonl}}\n"
    )
    return str(path)


def test_bad_values_are_refused_before_heavy_imports(base: str) -> None:
    refused = """rollout.engine=sgl rollout.temperature=0 rollout.top_p=7 actor.parallel.tp=3 cluster.nodes=2
        data.train=nowhere.jsonl data.val=nowhere.jsonl model.hf_path=/nowhere judge.tp=0 trainer.stps=1""".split()
    commands = [["train", base, override] for override in refused] + [["eval", base, "algorithm.advantage=grop"]]
    code = (
        "import sys\nfrom mcore_rl.cli import main\nfrom mcore_rl.config import load_config\n"
        f"from mcore_rl.preparation.preflight import check_run\ncodes = [main(command) for command in {commands!r}]\n"
        f"check_run(load_config({base!r}))\n"  # a valid configuration needs no slow imports either
        f"print(codes, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{[2] * len(commands)} []", done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine=sglang"], r"^rollout\.engine=sglang: nowhere/python is not there.* run `make sglang`"),
        (["rollout.engine=sglang", "cluster.device=cuda"], r"^rollout\.engine=sglang: nowhere/python is not there"),
        (["data.val=nowhere.jsonl"], r"^data\.val: there is no file nowhere\.jsonl"),
        (["data.val={hard: nowhere.jsonl}"], r"^data\.val\.hard: there is no file nowhere\.jsonl"),
        (["data.val={a/b: nowhere.jsonl}"], r"^data\.val: 'a/b' cannot name a set"),
        (["data.val={}"], r"^data\.val is an empty mapping"),
        (["data.weights={nowhere.jsonl: 2}"], r"^data\.weights: there is no file nowhere\.jsonl"),
        (["data.weights={'*.md': 2}", "data.curriculum=mine.py:order"], r"^data\.weights has no effect with"),
        (["cluster.nodes=2"], r"^cluster\.address must name the Ray cluster"),
        (
            ["cluster.nodes=2", "cluster.address=a:1", "cluster.placement=disaggregated", "rollout.num_engines=3"],
            r"leave no room for rollout\.num_engines=3",
        ),
        (
            ["cluster.nodes=2", "cluster.address=a:1", "cluster.gpus_per_node=3", "rollout.tp=4"],
            r"^rollout\.tp=4: an engine that spans nodes must fill them; set a multiple of cluster\.gpus_per_node=3",
        ),
        (["reward_model.hf_path=/nowhere"], r"^reward_model\.hf_path=/nowhere: no config\.json there"),
    ],
)
def test_what_cannot_start_here_is_refused_by_key(
    base: str, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCORE_RL_SGLANG_PYTHON", "nowhere/python")
    with pytest.raises(ConfigError, match=message):
        check_run(load_config(base, overrides))


def test_targets_need_no_engine_and_no_validation_file(base: str) -> None:
    check_run(load_config(base, ["algorithm.policy_loss.name=sft", "rollout.engine=sglang", "data.val=none.jsonl"]))


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_preflight_missing_gpus_rejected_unless_a_cluster_is_joined(base: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.device=cuda, but this machine has no GPU.*cluster\.device=cpu"):
        check_run(load_config(base, ["cluster.device=cuda"]))
    check_run(load_config(base, ["cluster.device=cuda", "cluster.address=10.0.0.1:6379"]))
    check_run(load_config(base, ["cluster.device=auto"]))


def test_a_gpu_is_what_has_a_device_file(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()  # a driver without devices, as in a container without GPUs
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia7").touch()
    assert has_gpu(tmp_path)


def test_other_processes_find_every_file(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ask.txt").write_text("{prompt} {response}")
    config = load_config(base, ["model.hf_path=model", "judge.hf_path=model", "judge.template=ask.txt"])
    check_run(config)
    assert config.model.hf_path == config.judge.hf_path == str(tmp_path / "model")
    assert config.judge.template == "{prompt} {response}"


def test_lists_globs_and_weights_of_relative_paths_stay_what_they_name(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    for name in ("a", "b"):
        Path("shards", f"{name}.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    config = load_config(base, ["data.train=[t.jsonl, 'shards/*.jsonl']", "data.weights={'shards/[b]*': 2}"])
    check_run(config)
    monkeypatch.chdir("/")
    assert [path.name for path in find_files(config.data.train, "data.train")] == ["t.jsonl", "a.jsonl", "b.jsonl"]
    assert file_weights(config.data.weights, config.data.train) == (1, 1, 2)
