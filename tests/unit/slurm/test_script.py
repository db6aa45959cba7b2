"""Job script of a configuration: resources, quoting and checks."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.placement import Guests, place, teacher_ranks
from mcore_rl.slurm.checks import looks_secret, seconds
from mcore_rl.slurm.script import render_job

ROOT = Path(__file__).parents[3]
NASTY = 'it\'s a "dir" with $HOME `x` \\ *'


def config(**slurm: object) -> Config:
    made = Config()
    made.run.dir, made.cluster.device, made.cluster.nodes, made.cluster.gpus_per_node = "runs/x", "cuda", 64, 8
    for name, value in slurm.items():
        setattr(made.slurm, name, value)
    return made


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def head_of(script: str) -> str:
    """Return the part of the script that differs between jobs; it runs without SLURM."""
    return script[: script.index("# The rest is")]


def printed(script: str, expression: str, cwd: Path) -> list[str]:
    """Return the words of an array of the script."""
    text = f"{head_of(script)}\nprintf '%s\\0' {expression}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=cwd, check=True)
    return done.stdout.split("\0")[:-1]


def test_render_job_requests_resources_of_cluster_section() -> None:
    found = options(render_job(config(partition="gpu", exclude="n[3-4]", extra=["--constraint=h100&ib"]), ["c.yaml"]))
    assert "--nodes=64" in found
    assert "--gpus-per-node=8" in found
    assert "--exclude='n[3-4]'" in found
    assert "--constraint='h100&ib'" in found
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@600", "--exclusive", "--mem=0"} <= set(found)
    on_cpu = config(cpus_per_node=4)
    on_cpu.cluster.device = "cpu"
    found = options(render_job(on_cpu, ["c.yaml"]))
    assert "--cpus-per-task=4" in found
    assert not [option for option in found if "gpu" in option or option == "--exclusive"]


def test_render_job_offers_ray_a_cpu_for_every_process(tmp_path: Path) -> None:
    made = config()
    made.cluster.nodes, made.rollout.num_engines = 2, 16
    made.reward_model.hf_path, made.judge.hf_path, made.judge.num_engines = "scorer", "judge", 16
    roles = [Guests("critic", 16), Guests("reward_model", 16), Guests("judge", 16, 1)]
    placement = place(made.cluster, made.rollout, 16, on_gpus=True, num_engines=16, guests=roles)
    assert placement.bundle["CPU"] == 40
    node = printed(render_job(made, ["c.yaml"]), '"${node[@]}"', tmp_path)
    assert int(node[node.index("--cpus") + 1]) == 41
    # Two teachers with 12 ranks each: 8 of both are on the first node.
    made.teacher = TeacherConfig(hf_path="a", by_source=[TeacherSourceConfig("b", hf_path="b")], num_ranks=12)
    roles.append(teacher_ranks(made.teacher))
    placement = place(made.cluster, made.rollout, 16, on_gpus=True, num_engines=16, guests=roles)
    assert placement.bundle["CPU"] == 56
    node = printed(render_job(made, ["c.yaml"]), '"${node[@]}"', tmp_path)
    assert int(node[node.index("--cpus") + 1]) == 57


def test_render_job_quotes_every_word(tmp_path: Path) -> None:
    made = config(environment={"NCCL_X": NASTY}, setup=["source env.sh"], job_name=NASTY)
    made.run.dir = NASTY
    overrides = ["data.train=a b.jsonl", f"run.dir={NASTY}"]
    script = render_job(made, ["my configs/c.yaml"], overrides)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert printed(script, '"${run[@]}"', tmp_path)[3:] == ["train", "my configs/c.yaml", *overrides]
    assert printed(script, '"$run_dir"', tmp_path) == [str(tmp_path / NASTY)]
    assert shlex.split(options(script)[0]) == [f"--job-name={NASTY}"]
    (tmp_path / "env.sh").write_text("FROM_SETUP=yes\n")
    enter = printed(script, '"$enter"', tmp_path)[0]
    command = [*("bash", "-c", enter, "name"), *("bash", "-c", 'printf %s "$NCCL_X $1"', "name", NASTY)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == f"{NASTY} {NASTY}"


def test_slurm_default_run_dir_is_fixed_for_all_starts_of_the_job(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(small[0]).write_text(Path(small[0]).read_text().replace("run: {dir: x}\n", ""))
    assert main(["slurm", "--force", *small]) == 0
    script = capsys.readouterr().out
    *_, last = printed(script, '"${run[@]}"', tmp_path)
    assert re.fullmatch(r"run\.dir=runs/config-\d{4}-\d\d-\d\d-\d{6}", last)
    assert printed(script, '"$run_dir"', tmp_path) == [str(tmp_path / last.removeprefix("run.dir="))]


def test_render_job_replaces_an_override_of_run_dir(tmp_path: Path) -> None:
    made = config()
    made.run.dir = "runs/x-2026-11-26-150301"
    words = printed(render_job(made, ["c.yaml"], ["run.dir=runs/x-{date}-{time}"]), '"${run[@]}"', tmp_path)
    assert words[3:] == ["train", "c.yaml", "run.dir=runs/x-2026-11-26-150301"]


@pytest.mark.parametrize("override", ["slurm.environment.A=private", "slurm={environment: {A: private}}"])
def test_render_job_shows_values_of_the_environment_to_tasks_only(override: str, tmp_path: Path) -> None:
    script = render_job(config(environment={"A": "private"}), ["c.yaml"], [override])
    assert script.count("private") == script.count("export A=private") == 1
    assert printed(script, '"${run[@]}"', tmp_path)[3:5] == ["train", "c.yaml"]


def test_render_job_fabric_test_has_all_slots_and_stage_timeout(tmp_path: Path) -> None:
    assert printed(render_job(config(), ["c.yaml"]), '"${fabric[@]}"', tmp_path) == [""]
    made = config(fabric_test=True, fabric_slow_percent=70, start_timeout_seconds=1200)
    assert printed(render_job(made, ["c.yaml"]), '"${fabric[@]}"', tmp_path)[3:] == (
        "--nodes 64 --slots 8 --timeout-seconds 150 --slow-percent 70".split()
    )


def test_failing_setup_command_fails_the_task(tmp_path: Path) -> None:
    enter = printed(render_job(config(setup=["source absent.sh"]), ["c.yaml"]), '"$enter"', tmp_path)[0]
    assert subprocess.run(["bash", "-c", enter, "name", "true"], cwd=tmp_path, check=False).returncode != 0


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (
            "pyxis",
            ["--container-image=i m.sqsh", "--container-workdir={0}", "--container-mounts={0}:{0},{0}/r:{0}/r,/d:/d"],
        ),
        ("apptainer", [*"apptainer exec --nv --pwd {0} --bind {0} --bind {0}/r --bind /d:/d".split(), "i m.sqsh"]),
    ],
)
def test_containers_mount_working_and_run_directory(tmp_path: Path, container: str, expected: list[str]) -> None:
    made = config(container=container, container_image="i m.sqsh", container_mounts=["/d:/d"])
    made.run.dir = "r"
    assert printed(render_job(made, ["c.yaml"]), '"${container[@]}"', tmp_path) == [
        word.format(tmp_path) for word in expected
    ]


def test_own_variables_override_defaults(tmp_path: Path) -> None:
    script = render_job(config(environment={"NCCL_DEBUG": "INFO"}), ["c.yaml"])
    assert len(re.findall("export NCCL_DEBUG=", script)) == 1
    assert "export NCCL_DEBUG=INFO" in script
    assert "set -euo pipefail" in script


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 1800), ("10:30", 630), ("04:00:00", 14400), ("1-2", 93600), ("2-12:00", 216000), ("UNLIMITED", None)],
)
def test_seconds_parses_time_limits_like_slurm(text: str, expected: int | None) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"time_limit": "soon"}, "slurm.time_limit"),
        ({"time_limit": "10"}, "slurm.grace_seconds"),
        ({"container": "pyxis"}, "slurm.container_image"),
        ({"container_mounts": ["/a"]}, "slurm.container_mounts"),
        ({"environment": {"A-B": "1"}}, "slurm.environment"),
        ({"environment": {"HF_TOKEN": "1"}}, r"slurm\.environment\.HF_TOKEN .* slurm\.pass_environment=\[HF_TOKEN\]"),
        ({"pass_environment": ["A B"]}, "slurm.pass_environment"),
        ({"pass_environment": ["A"], "environment": {"A": "1"}}, r"slurm\.environment\.A .*slurm\.pass_environment"),
        ({"job_name": "two\nlines"}, "slurm.job_name"),
        ({"extra": ["constraint=x"]}, "slurm.extra"),
        ({"fabric_slow_percent": 101}, "slurm.fabric_slow_percent"),
    ],
)
def test_invalid_job_is_rejected_with_its_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        render_job(config(**change), ["c.yaml"])


def test_looks_secret_detects_names_of_secrets_only() -> None:
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "PASSWORD", "SSH_PASSPHRASE")
    others = ("TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "RAY_AUTH_TOKEN_PATH", "MAX_TOKENS", "KEYS")
    assert [name for name in (*secrets, *others) if looks_secret(name)] == list(secrets)


def test_job_requires_explicit_device_and_its_own_ray() -> None:
    for key, value in (("device", "auto"), ("address", "10.0.0.1:6379")):
        made = config()
        setattr(made.cluster, key, value)
        with pytest.raises(ConfigError, match=rf"cluster\.{key}"):
            render_job(made, ["c.yaml"])


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_ready_scripts_match_their_command(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    script = path.read_text()
    command = shlex.split(script.splitlines()[1].removeprefix("# Rendered by: "))
    # --force, because `plan` rejects these runs on several nodes in this version.
    assert command[:3] == ["mcore-rl", "slurm", "--force"]
    assert main(command[1:]) == 0
    assert capsys.readouterr().out == script


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Arguments of a command with a configuration whose files exist."""
    (tmp_path / "model").mkdir()
    hf = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "t.jsonl").touch()
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {{dir: x}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: {tmp_path}/t.jsonl}}\n")
    return [str(path), "cluster.device=cuda"]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor.moe.router_replay=engine", "actor.moe.router_replay=engine: vLLM returns no experts"),
        ("data.val=nowhere.jsonl", "data.val: there is no file nowhere.jsonl"),
        ("model.hf_path=configs/models/DeepSeek-V3", "model.hf_path=configs/models/DeepSeek-V3: no safetensors there"),
        ("model.tokenizer_path=nowhere", "model.tokenizer_path=nowhere does not exist"),
        ("judge={hf_path: m, template: nowhere.txt}", "judge.template=nowhere.txt cannot be read"),
    ],
)
def test_job_that_cannot_run_is_rendered_only_with_force(
    small: list[str], override: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["slurm", *small, override]) == 2
    printed = capsys.readouterr()
    assert reason in printed.err
    assert "--force prints the script anyway" in printed.err
    assert printed.out == ""
    assert main(["slurm", *small, override, "--force"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/usr/bin/env bash\n# Rendered by: mcore-rl slurm --force")
    assert f"note: {reason}" in printed.err


def test_ready_scripts_exist() -> None:
    assert {path.stem for path in (ROOT / "slurm").glob("*.sbatch")} >= {"demo_2_nodes", "dapo_deepseek_v3_671b"}
