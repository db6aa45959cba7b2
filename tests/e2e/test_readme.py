"""Commands of the README and the docs, run like a reader runs them, in a copy of this checkout.

A command is in CASES and is run, or in NOT_RUN with a marker of what it needs. A command in neither fails the test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from _pytest.mark import ParameterSet

from tests.code_blocks import block_that_begins, documented_commands
from tests.e2e.command_cases import GUIDE_CASES, GUIDE_NOT_RUN, MODEL_CASES, Case, Need, NotRun
from tests.e2e.runs import ONE_RANK
from tests.readme import ROOT, commands, readme

LAUNCH_SCRIPTS = "tests/unit/migration/scripts"
ONE_STEP = "trainer.steps=1 trainer.prompts_per_step=2 trainer.prompts_per_update=2 data.val_max_prompts=2"
KEPT_RUN = (
    f"{ONE_STEP} data.train=train.jsonl data.val=null model.hf_path=mine model.random_init=false "
    "rollout.max_response_tokens=80 reward.function=my_reward.py:score"
)
NO_FILTER = "algorithm.dynamic_sampling.enable=false"
ON_ONE_RANK = " ".join(ONE_RANK)
"""For runs that only prepare a case: saves the start of a process."""


CASES = {
    "source .venv/bin/activate": Case(add="&& mcore-rl --help", says="train"),
    "mcore-rl train configs/gsm8k_cpu.yaml data.train=train.jsonl data.val=test.jsonl model.hf_path=DIR "
    "model.random_init=false run.dir=runs/mine": Case(
        add=f"{ONE_STEP} rollout.max_response_tokens=80 reward.function=my_reward.py:score",
        where={"DIR": "mine"},
        needs=("mine",),
        says="run directory: .*runs/mine",
        on_demand=True,  # `make demo` is a run too, and other cases check this configuration with --dry-run
    ),
    "make demo": Case(add=f"{ONE_STEP} {NO_FILTER}", needs=("work3",), says="run directory  runs/demo"),
    "python scripts/demo.py --task think2": Case(
        add=f"{ONE_STEP} {NO_FILTER}", needs=("think2",), says="run directory  runs/demo_think", on_demand=True
    ),
    "make demo MODE=async": Case(
        add=f"{ONE_STEP} {NO_FILTER}", needs=("work3",), says="run directory  runs/demo_async", on_demand=True
    ),
    "make demo TASK=tool": Case(
        add=f"{ONE_STEP} {NO_FILTER}", needs=("tool",), says="run directory  runs/demo_tool", on_demand=True
    ),
    "make demo TASK=game": Case(
        add=f"{ONE_STEP} {NO_FILTER}", needs=("game",), says="run directory  runs/demo_game", on_demand=True
    ),
    "python scripts/compare_algorithms.py": Case(
        add="--only dapo --steps 1", needs=("work3", "compared"), says=r"dapo +0\.250 +0\.500"
    ),
    "mcore-rl plan configs/dapo_deepseek_v3_671b.yaml": Case(says="671", on_demand=True),
    # The next case plans the same recipe with another file and another key.
    "mcore-rl plan configs/gsm8k_cpu.yaml trainer.steps=10": Case(on_demand=True),
    "mcore-rl plan base.yaml model.yaml rollout.tp=1": Case(
        where={"base.yaml": "configs/gsm8k_cpu.yaml", "model.yaml": "layer.yaml"},
    ),
    "mcore-rl plan my.yaml --suggest": Case(
        where={"my.yaml": "configs/qwen3_30b_a3b.yaml"}, says=r"actor\.parallel\.\w+=", on_demand=True
    ),
    "mcore-rl plan configs/qwen3_30b_a3b.yaml": Case(on_demand=True),
    "mcore-rl plan configs/deepseek_v3_256_gpus.yaml cluster.gpu_memory_gib=64": Case(
        codes=frozenset({1}),
        says=r"does not fit(.|\n)*cluster\.gpu_memory_gib|cluster\.gpu_memory_gib(.|\n)*not fit",
        on_demand=True,
    ),
    "mcore-rl plan configs/dapo_deepseek_v3_671b.yaml cluster.nodes=32 --suggest": Case(
        says=r"actor\.parallel\.\w+=", on_demand=True
    ),
    "mcore-rl slurm configs/my.yaml cluster.nodes=8 slurm.partition=gpu > job.sbatch && sbatch job.sbatch": Case(
        needs=("mine",), says=r"(?s)^(?=.*--nodes=8\n)(?=.*--partition=gpu\n)"
    ),
    "python -m model_converters to-mcore --hf DIR --out CKPT --tp 2 --pp 4 --ep 8": Case(
        where={"DIR": "mine", "CKPT": "converted"}, needs=("mine",)
    ),
    "python -m model_converters to-hf --ckpt CKPT --out DIR": Case(
        where={"DIR": "exported", "CKPT": "converted"}, needs=("mine", "converted")
    ),
    "python -m model_converters verify --hf DIR --ckpt CKPT --logits": Case(
        where={"DIR": "mine", "CKPT": "converted"}, needs=("mine", "converted"), says="logit"
    ),
    "python -m model_converters show --config DIR --tp 2": Case(
        where={"DIR": "mine"}, needs=("mine",), says="linear_qkv"
    ),
    "python scripts/tiny_checkpoint.py deepseek_v3 DIR": Case(where={"DIR": "deepseek"}, says="wrote deepseek"),
    "mcore-rl import-verl run_grpo.sh --out config.yaml": Case(
        where={"run_grpo.sh": f"{LAUNCH_SCRIPTS}/grpo_gsm8k.sh"}, says="next: mcore-rl plan config.yaml"
    ),
    "mcore-rl import-slime run-qwen3-30B-A3B.sh --out config.yaml": Case(
        where={"run-qwen3-30B-A3B.sh": f"{LAUNCH_SCRIPTS}/slime_grpo.sh", "config.yaml": "slime.yaml"},
        says="next: mcore-rl plan slime.yaml",
    ),
    "mcore-rl plan config.yaml model.hf_path=DIR": Case(
        where={"config.yaml": "slime.yaml", "DIR": "configs/models/Qwen3-30B-A3B"},
        needs=("imported",),
        codes=frozenset({0, 1}),
        says="fit",
        on_demand=True,  # tests/unit/migration/test_plan.py plans imported configurations
    ),
    "mcore-rl train CONFIG.yaml 'observe.profile.steps=[3,4]' 'observe.profile.ranks=[0]'": Case(
        add="trainer.steps=4 run.dir=runs/profiled",
        where={"CONFIG.yaml": "configs/my.yaml"},
        needs=("mine",),
        says="run directory: .*runs/profiled",
        on_demand=True,
    ),
    "mcore-rl train CONFIG.yaml observe.keep_trajectories=4": Case(
        add=f"{KEPT_RUN} run.dir=runs/recorded",
        where={"CONFIG.yaml": "configs/gsm8k_cpu.yaml"},
        needs=("mine",),
        says="run directory: .*runs/recorded",
        on_demand=True,
    ),
    "mcore-rl debug train RUN_DIR --step 3": Case(
        where={"RUN_DIR": "runs/kept", "3": "1"},
        needs=("mine", "kept"),
        says=r"all \d+ metrics are equal to the recorded ones",
        on_demand=True,
    ),
    "mcore-rl init --model DIR --train train.jsonl --out my.yaml": Case(
        where={"DIR": "mine"}, needs=("mine",), says="(?s)plan: fits.*next: mcore-rl train my.yaml"
    ),
    "mcore-rl train CONFIG.yaml --dry-run": Case(
        add="run.dir=runs/dry trainer.export_hf=null",
        where={"CONFIG.yaml": "configs/my.yaml"},
        needs=("mine",),
        says="dry run: nothing was started",
    ),
    "mcore-rl doctor": Case(says="torch"),
    "mcore-rl doctor --node": Case(says="fabric: all well", on_demand=True),  # tests/distributed/test_fabric.py
    "source <(mcore-rl completion bash)": Case(add="&& complete -p mcore-rl", says="-F _python_argcomplete mcore-rl"),
    "mcore-rl completion bash": Case(says="-F _python_argcomplete"),
    "mcore-rl completion zsh": Case(says="^#compdef mcore-rl"),
    "mcore-rl completion fish": Case(says="complete --command mcore-rl"),
    "mcore-rl keys lr": Case(says=r"actor\.optimizer\.lr"),
    "mcore-rl keys correction_preset": Case(says="decoupled_seq_is_rs"),
    "mcore-rl report runs/demo": Case(
        where={"runs/demo": "runs/compare/dapo"}, needs=("compared",), says="runs/compare/dapo/report.html"
    ),
    "mcore-rl report runs/a runs/b --out both.html": Case(
        where={"runs/[ab]": "runs/compare/dapo"}, needs=("compared",), says="both.html"
    ),
    "mcore-rl watch runs/demo": Case(
        add="--once",
        where={"runs/demo": "runs/compare/dapo"},
        needs=("compared",),
        says="not running(.|\\n)*val/accuracy",
    ),
    "mcore-rl compare runs/a runs/b": Case(
        where={"runs/a": "runs/other", "runs/b": "runs/compare/dapo"},
        needs=("compared", "other"),
        says=r"best val/accuracy +0\.5 +0\.5 +\+0",
    ),
    "python scripts/screenshot_report.py RUN_DIR OUT.png": Case(add="--help", says="--theme"),
    "make bench": Case(add="--smallest advantages", says="advantages"),
    'make bench ARGS="--smallest NAME"': Case(where={"NAME": "advantages"}, says="advantages"),
}
CASES |= GUIDE_CASES | MODEL_CASES
NOT_RUN = {
    "make test": NotRun(Need.SUITE),
    # Fills a GPU where there is one.
    "make gpu": NotRun(Need.GPUS, "tests/unit/test_gpu_tests.py"),
    "make setup EXTRA=gpu": NotRun(Need.INSTALLATION),
    "make sglang EXTRA=gpu": NotRun(Need.INSTALLATION),
    "make browser": NotRun(Need.INSTALLATION, ".ci/run"),
    "scripts/setup_trl.sh": NotRun(Need.INSTALLATION),
    "scripts/setup_mbridge.sh": NotRun(Need.INSTALLATION),
}
NOT_RUN |= GUIDE_NOT_RUN
READY = {
    # vLLM has no CPU kernel for head size 16; the recipe's tokenizer completes the HF directory.
    "mine": "python scripts/tiny_checkpoint.py qwen3_moe mine --set head_dim=32 --set vocab_size=1280 "
    "--set eos_token_id=0 --set max_position_embeddings=1024 && cp configs/models/gsm8k_tiny/tokenizer* mine",
    "converted": "python -m model_converters to-mcore --hf mine --out converted --tp 2 --pp 4 --ep 8",
    "work3": "python scripts/demo_task.py --task work3 --out runs/demo_task/work3 && "
    f"mcore-rl train configs/demo_warm_start_cpu.yaml trainer.steps=1 {ON_ONE_RANK}",
    "think2": "python scripts/demo_task.py --task think2 --out runs/demo_task/think2 && "
    "cp -r runs/demo_task/think2/model runs/demo_task/think2/warm_start",
    "tool": "python scripts/demo_task.py --task tool --out runs/demo_task/tool && "
    "cp -r runs/demo_task/tool/model runs/demo_task/tool/warm_start",
    "game": "python scripts/demo_task.py --task game --out runs/demo_task/game && "
    "cp -r runs/demo_task/game/model runs/demo_task/game/warm_start",
    "kept": f"mcore-rl train configs/gsm8k_cpu.yaml {KEPT_RUN} observe.keep_trajectories=1 run.dir=runs/kept",
    "imported": f"mcore-rl import-slime {LAUNCH_SCRIPTS}/slime_grpo.sh --out slime.yaml",
    "compared": "mkdir -p runs/compare/dapo && cp compared.jsonl runs/compare/dapo/metrics.jsonl",
    "job": "mcore-rl slurm configs/my.yaml cluster.nodes=64 slurm.partition=gpu > job.sbatch",
    "other": "mkdir -p runs/other && cp compared.jsonl runs/other/metrics.jsonl",
}
"""Commands that create prerequisites. The first demo's warm start has one step; other demos skip their warm start."""


@dataclass
class Clone:
    """A copy of the working tree with a reader's shell environment."""

    path: Path
    environment: dict[str, str]
    done: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command; the second time return the result of the first."""
        if command not in self.done:
            self.done[command] = self._run(command)
        return self.done[command]

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=540,
            check=False,
        )

    def make_ready(self, *names: str) -> None:
        for name in names:
            made = self.shell(READY[name])
            assert made.returncode == 0, f"{READY[name]}\n{made.stdout[-6000:]}"

    def recipe_of(self, command: str, add: str) -> str:
        """Return the commands of a make target without the set-up of .venv, which exists."""
        arguments = f" ARGS={shlex.quote(add)}" if add else ""  # an empty ARGS would replace the one of the command
        listed = self.shell(f"make --no-print-directory -n {command.removeprefix('make ')}{arguments}")
        assert listed.returncode == 0, listed.stdout
        return "\n".join(line for line in listed.stdout.splitlines() if "scripts/setup.sh" not in line)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    path = tmp_path_factory.mktemp("alone") / "mcore-rl"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, path / name)
    (path / ".venv").symlink_to(sys.prefix)
    write_what_a_reader_has(path)
    # Without a cluster, a stand-in for sbatch checks the syntax of the script.
    stand_in = path.parent / "bin" / "sbatch"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\ncat "$1"\nexec bash -n "$1"\n')
    stand_in.chmod(0o755)
    search = [str(stand_in.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    clone = Clone(path, {**os.environ, "PATH": os.pathsep.join(search), "PYTHONPATH": str(path)})
    assert str(path) in clone.shell("python -P -c 'import mcore_rl; print(mcore_rl.__file__)'").stdout
    return clone


def write_what_a_reader_has(path: Path) -> None:
    """Write data, the README's reward function, and a configuration."""
    rows = [{"question": f"Tom has {n} apples and buys {n}. How many?", "answer": f"#### {2 * n}"} for n in range(1, 9)]
    for name in ("train", "test"):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "my_reward.py").write_text(block_that_begins("README.md", "# my_reward.py"))
    (path / "my_tools.py").write_text(block_that_begins("docs/tools.md", "# my_tools.py"))
    figures = [{"step": step, "val/accuracy": 0.25 + 0.25 * step, "reward/mean": 0.5} for step in (0, 1)]
    (path / "compared.jsonl").write_text("".join(json.dumps(row) + "\n" for row in figures))
    (path / "layer.yaml").write_text("trainer:\n  steps: 2\n")
    # A supervised run, because the command is not supported for reinforcement learning.
    mine = yaml.safe_load((path / "configs" / "demo_warm_start_cpu.yaml").read_text())
    mine["model"]["hf_path"], mine["data"]["train"] = "mine", "train.jsonl"
    (path / "configs" / "my.yaml").write_text(yaml.safe_dump(mine))


def all_commands() -> list[str]:
    """Return the commands of all code blocks, and those in the text of the first steps' pages."""
    return list(dict.fromkeys([*commands(readme()), *documented_commands()]))


def _commands() -> list[ParameterSet]:
    on_demand = {command for command, case in CASES.items() if case.on_demand}
    return [
        pytest.param(
            command,
            id=f"{f'{NOT_RUN[command].need}: ' if command in NOT_RUN else ''}{command[:60]}",
            marks=[pytest.mark.on_demand] * (command in on_demand),
        )
        for command in all_commands()
    ]


def test_every_command_has_a_case_or_a_marker_and_no_entry_is_stale() -> None:
    assert not CASES.keys() & NOT_RUN.keys()
    new = [command for command in all_commands() if command not in CASES and command not in NOT_RUN]
    assert new == [], "new in README or docs: run it here (CASES), or state what it needs (NOT_RUN)"
    assert {*CASES, *NOT_RUN} <= set(all_commands())
    assert [entry for entry in NOT_RUN.values() if entry.instead and not (ROOT / entry.instead).is_file()] == []


def syntax_check(command: str) -> str:
    """Return a command that checks the syntax of one that is not run."""
    program, _, arguments = command.partition(" ")
    if program == "make":
        return f"make --no-print-directory -n {arguments}"
    return f"bash -n {program}" if program.endswith(".sh") else f"bash -n -c {shlex.quote(command)}"


@pytest.mark.parametrize("command", _commands())
def test_command_of_readme_or_docs_runs(command: str, clone: Clone) -> None:
    if command in NOT_RUN:
        checked = clone.shell(syntax_check(command))
        assert checked.returncode == 0, checked.stdout
        return
    case = CASES[command]
    clone.make_ready(*case.needs)
    for name, ours in case.where.items():
        command = re.sub(rf"\b{name}\b", ours, command)
    typed = clone.recipe_of(command, case.add) if command.startswith("make ") else f"{command} {case.add}".strip()
    done = clone.shell(typed)
    assert done.returncode in case.codes, f"$ {typed}\nexit code {done.returncode}\n{done.stdout[-6000:]}"
    assert re.search(case.says, done.stdout), f"$ {typed}\n{done.stdout[-6000:]}"
