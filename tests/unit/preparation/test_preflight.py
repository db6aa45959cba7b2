"""Preflight checks: errors that are reported in the first second of a run, before slow imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.config import load_config
from mcore_rl.config.rules.engine_support import SGLANG_PYTHON, SGLANG_VERSION
from mcore_rl.config.schema import ClusterConfig
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError
from mcore_rl.preparation import preflight
from mcore_rl.preparation.preflight import check_run, check_update, has_gpu, missing_files, torch_has_cuda
from mcore_rl.preparation.prepare import prepare
from mcore_rl.resolved.nccl import NcclPackages
from tests.environments import make_environment

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
    ("overrides", "reads"),
    [
        ([], True),
        (["trainer.objective=sft"], True),
        (["trainer.objective=dpo"], True),
        (["algorithm.policy_loss.name=sft"], False),
    ],
)
def test_missing_files_name_validation_data_that_is_read(base: str, overrides: list[str], reads: bool) -> None:
    config = load_config(base, [*overrides, "data.val=nowhere.jsonl"])
    messages = missing_files(config, cuda=False)
    assert any("nowhere.jsonl" in message for message in messages) is reads


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


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("{file}/w", r"^weights\.directory: .*/file/w/mcore_rl_probe-\w+: NotADirectoryError: .*; check that every "),
        ("nowhere://w", r"^weights\.directory=nowhere://w: nowhere:// is not known to fsspec; use one such as s3://"),
        ("s3://bucket/w", r"^weights\.directory=s3://bucket/w: Install s3fs.*; install it with pip in /"),
        ("http://localhost:1/w", r"^weights\.directory: http://localhost:1/w/mcore_rl_probe-\w+: "),
    ],
)
def test_check_run_directory_of_weights_must_be_writable(
    base: str, directory: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    overrides = ["weights.transport=files", f"weights.directory={directory.format(file=file)}"]
    with pytest.raises(ConfigError, match=message):
        check_run(load_config(base, overrides))
    check_run(load_config(base, overrides), sends_weights=False)


def test_check_run_creates_the_directory_of_weights_and_leaves_it_empty(base: str, tmp_path: Path) -> None:
    check_run(load_config(base, ["weights.transport=files", f"weights.directory={tmp_path}/new/weights"]))
    assert list((tmp_path / "new").rglob("*")) == [tmp_path / "new" / "weights"]


def environment_without(package: str, directory: Path) -> Path:
    """Return an interpreter that stands for SGLang's: this one, but it cannot import `package`."""
    python = directory / "python"
    hidden = f"import sys; sys.modules['{package}'] = None"
    python.write_text(f'#!/bin/sh\nshift; code=$1; shift; exec {sys.executable} -c "{hidden}\n$code" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("fsspec", r"No module named 'fsspec.*; run `/\S+ -m pip install fsspec`$"),
        (
            "fsspec.implementations.memory",
            r".*; install it with pip in /\S+, or set weights\.directory to a local path$",
        ),
        ("unrelated", ""),
    ],
)
def test_check_run_package_of_weight_files_that_sglang_lacks_is_named(
    base: str, package: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "missing_engine", lambda *sections: None)
    monkeypatch.setenv("MCORE_RL_SGLANG_PYTHON", str(environment_without(package, tmp_path)))
    directory = "weights.directory=memory://bucket/weights"
    config = load_config(base, ["rollout.engine=sglang", "weights.transport=files", directory])
    start = r"^rollout\.engine=sglang reads weights\.directory itself: weights\.directory=memory://bucket/weights: "
    with pytest.raises(ConfigError, match=start + message) if message else nullcontext():
        check_run(config)


DIFFERENT_NCCL = NcclPackages(("nvidia-nccl-cu13", "2.29.7"), ("nvidia-nccl-cu13", "2.30.7"))
SENT_WITH_NCCL = ["rollout.engine=sglang", "cluster.device=cuda", "cluster.placement=disaggregated"]


@pytest.mark.parametrize(
    ("changes", "rejected"),
    [
        ([], True),
        (["weights.transport=network"], True),
        (["weights.transport=shared_memory"], False),
        (["cluster.placement=colocated"], False),
        (["cluster.device=cpu"], False),
        (["cluster.device=auto"], False),  # without a GPU
        (["rollout.engine=vllm"], False),  # in the trainer's environment
        (["algorithm.policy_loss.name=sft"], False),
    ],
)
def test_check_run_different_nccl_is_rejected_if_it_sends_weights(
    base: str, changes: list[str], rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "missing_engine", lambda *sections: None)
    monkeypatch.setattr(preflight, "nccl_packages", lambda: DIFFERENT_NCCL)
    monkeypatch.setattr(ClusterConfig, "uses_cuda", property(lambda cluster: cluster.device == "cuda"))
    config = load_config(
        base, [*SENT_WITH_NCCL, "actor.num_ranks=1", "cluster.gpus_per_node=2", "cluster.address=a:1", *changes]
    )
    message = r"^rollout\.engine=sglang: NCCL .*trainer's .* has 2\.29\.7, and SGLang's has 2\.30\.7; install one"
    with pytest.raises(ConfigError, match=message) if rejected else nullcontext():
        check_run(config)
    check_run(config, sends_weights=False)


def test_different_nccl_is_rejected_before_heavy_imports(base: str, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "sglang", {"sglang": SGLANG_VERSION, "nvidia-nccl-cu13": "2.30.7"})
    code = (
        "import sys\nfrom mcore_rl.cli import main\nfrom mcore_rl.resolved import nccl\n"
        "nccl.nccl_in = lambda folders, of=nccl.nccl_in: of(folders) or ('nvidia-nccl-cu13', '2.29.7')\n"
        f"print(main({['train', base, *SENT_WITH_NCCL]!r}), [name for name in {HEAVY!r} if name in sys.modules])"
    )
    environment = os.environ | {SGLANG_PYTHON: str(python)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "2 []", done.stderr
    assert "pip install --no-deps nvidia-nccl-cu13==2.30.7" in " ".join(done.stderr.split())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_check_run_judge_with_sglang_passes_on_every_device(
    base: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "missing_engine", lambda *sections: None)
    judge = f"judge={{hf_path: {tmp_path}/model, template: '{{prompt}} {{response}}', engine: sglang}}"
    check_run(load_config(base, [judge, f"cluster.device={device}", "cluster.address=a:1"]))


def test_targets_need_no_engine_and_no_validation_file(base: str) -> None:
    check_run(load_config(base, ["algorithm.policy_loss.name=sft", "rollout.engine=sglang", "data.val=none.jsonl"]))


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_preflight_missing_gpus_rejected_unless_a_cluster_is_joined(base: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.device=cuda, but this machine has no GPU.*cluster\.device=cpu"):
        check_run(load_config(base, ["cluster.device=cuda"]))
    check_run(load_config(base, ["cluster.device=cuda", "cluster.address=10.0.0.1:6379"]))


@pytest.mark.parametrize(
    ("has_file", "has_cuda", "visible", "device"),
    [
        (True, True, None, "cuda"),
        (True, True, "0,1", "cuda"),
        (True, True, "", "cpu"),
        (True, True, "-1", "cpu"),
        (True, False, None, "cpu"),
        (False, True, None, "cpu"),
    ],
)
def test_preflight_auto_becomes_the_device_of_this_machine(
    base: str, has_file: bool, has_cuda: bool, visible: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_gpu", lambda: has_file)
    monkeypatch.setattr(preflight, "torch_has_cuda", lambda: has_cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for check in (check_run, check_update):
        config = load_config(base, ["cluster.device=auto"])
        check(config)
        assert config.cluster.device == device


def test_torch_has_cuda_equals_the_imported_torch() -> None:
    assert torch_has_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize(("version", "found"), [("'13.0'", True), ("None", False)])
def test_torch_has_cuda_reads_the_version_of_the_build(
    version: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2'\ncuda: Optional[str] = {version}\nhip: str = '6'\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: spec)
    assert torch_has_cuda() == found


@pytest.mark.parametrize(
    ("overrides", "on_gpus", "message"),
    [
        # SGLang on CPU would pad what its ranks do not divide; on GPUs it replicates these heads.
        (
            ["rollout.engine=sglang", "rollout.tp=4", "cluster.gpus_per_node=4"],
            False,
            r"^rollout\.tp=4: SGLang on CPU needs num_key_value_heads",
        ),
        (["rollout.engine=sglang", "rollout.tp=4", "cluster.gpus_per_node=4"], True, None),
        (["rollout.engine=sglang", "rollout.gpu_memory_fraction=1"], True, r"^rollout\.gpu_memory_fraction=1 leaves"),
        (["rollout.engine=sglang", "rollout.gpu_memory_fraction=1"], False, None),
        (["rollout.engine=sglang", "judge.hf_path={model}"], True, None),
        (["rollout.engine=sglang", "judge.hf_path={model}"], False, None),
        (["actor.moe.router_replay=engine"], True, r"^actor\.moe\.router_replay=engine: vLLM returns no experts"),
        (["actor.moe.router_replay=engine"], False, None),
        (["rollout.num_engines=2"], True, r"^rollout\.num_engines=2 of rollout\.tp=1 do not fit on the GPUs of 1"),
        (["rollout.num_engines=2"], False, None),
    ],
)
def test_preflight_auto_follows_the_rules_of_its_device(
    base: str, tmp_path: Path, overrides: list[str], on_gpus: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_gpu", lambda: on_gpus)
    monkeypatch.setattr(preflight, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(preflight, "missing_engine", lambda *_: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    judge = ["judge.template='{prompt} {response}'"] if any("judge" in override for override in overrides) else []
    config = load_config(base, [*(each.replace("{model}", str(tmp_path / "model")) for each in overrides), *judge])
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_run(config)


def test_prepare_rejects_a_gpu_that_torch_cannot_use(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has device files, but is broken or too old."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^cluster\.device=cuda .*torch cannot use a GPU here.*cluster\.device=cpu"):
        prepare(load_config(base, ["cluster.device=cuda"]))


def test_a_gpu_is_what_has_a_device_file(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()  # a driver without devices, as in a container without GPUs
    (tmp_path / "kfd").touch()  # a GPU of AMD, which builds for CUDA cannot use
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
