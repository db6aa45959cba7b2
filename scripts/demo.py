"""`make demo`: prepare a task, warm-start a tiny model on it, improve it with DAPO, distillation or DPO, and show
the accuracy.

A complete stage is skipped and an incomplete one resumed, so the command can always be repeated. Overrides `key=value`
apply to the run after the warm start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import demo_task

from mcore_rl.config import load_config
from mcore_rl.errors import ConfigError
from mcore_rl.observe.metrics import read_metrics
from mcore_rl.observe.summary import summary_table

ROOT = Path(__file__).resolve().parents[1]
TWO_HOSTS = str(ROOT / "scripts" / "two_hosts.sh")
ON_TWO_HOSTS = (
    *("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.address=10.213.7.1:6379"),
    "rollout.num_engines=2",
)
"""Overrides for one trainer rank and one engine on each host."""
WARM_START_CONFIG = "configs/demo_warm_start_cpu.yaml"


@dataclass(frozen=True)
class Demo:
    """Task, its configuration with its engine, and its directories relative to the repository.

    model: name of the warm-started model in the task's directory. teacher: task whose warm-started model is the teacher
    of the run; only its warm start runs. method: name of the training after the warm start. measure: meaning
    of val/accuracy.
    """

    task: str
    config: str
    run: str
    warm_start_overrides: tuple[str, ...] = ()
    engine: str = "vllm"
    model: str = "warm_start"
    teacher: Demo | None = None
    method: str = "DAPO"
    measure: str = f"accuracy on {demo_task.NUM_HELD_OUT} validated problems"

    @property
    def data(self) -> str:
        return f"runs/demo_task/{self.task}"

    @property
    def warm_start_run(self) -> str:
        return f"{self.run}_warm_start"

    @property
    def exported(self) -> str:
        return f"{self.data}/{self.model}"

    def warm_start_arguments(self) -> list[str]:
        return [
            WARM_START_CONFIG,
            f"run.dir={self.warm_start_run}",
            f"model.hf_path={self.data}/model",
            f"data.train={self.data}/warm_start.jsonl",
            f"trainer.export_hf={self.exported}",
            *self.warm_start_overrides,
        ]


DEMOS = {
    "work3": Demo("work3", "configs/demo_cpu.yaml", "runs/demo"),
    "think2": Demo("think2", "configs/demo_think_cpu.yaml", "runs/demo_think", ("trainer.steps=280",)),
    "work3 async": Demo("work3", "configs/demo_async_cpu.yaml", "runs/demo_async"),
    "latent": Demo(
        "latent",
        "configs/demo_latent_cpu.yaml",
        "runs/demo_latent",
        ("trainer.steps=300", "actor.optimizer.lr=2e-3", "actor.optimizer.decay_steps=300"),
        engine="sglang",
    ),
    "work3 fsdp2": Demo(
        "dense",
        "configs/demo_fsdp2_cpu.yaml",
        "runs/demo_fsdp2",
        (
            *("actor.parallel.ep=1", "actor.strategy=fsdp2"),
            *("trainer.steps=145", "actor.optimizer.decay_steps=180"),
        ),
    ),
    "see": Demo(
        "see",
        "configs/demo_see_cpu.yaml",
        "runs/demo_see",
        (
            *("actor.parallel.ep=1", "actor.train_vision=true", "rollout.max_prompt_tokens=16"),
            *("rollout.max_response_tokens=4", "trainer.steps=25"),
        ),
    ),
    "distill": Demo(
        "work3",
        "configs/demo_distill_cpu.yaml",
        "runs/demo_distill",
        teacher=Demo(
            "dense",
            "configs/demo_distill_cpu.yaml",
            "runs/demo_distill_teacher",
            ("actor.parallel.ep=1", "trainer.steps=260", "actor.optimizer.decay_steps=260"),
            model="teacher",
        ),
        method="distillation",
    ),
    "dpo": Demo(
        "dpo",
        "configs/demo_dpo_cpu.yaml",
        "runs/demo_dpo",
        method="DPO",
        measure=f"fraction of {demo_task.NUM_HELD_OUT} validated pairs in which the right response has more reward",
    ),
    "tool": Demo("tool", "configs/demo_tool_cpu.yaml", "runs/demo_tool", ("rollout.max_prompt_tokens=24",)),
    "agent": Demo("tool", "configs/demo_agent_cpu.yaml", "runs/demo_agent", ("rollout.max_prompt_tokens=24",)),
    "game": Demo(
        "game",
        "configs/demo_game_cpu.yaml",
        "runs/demo_game",
        (
            *("trainer.steps=250", "trainer.prompts_per_step=128", "trainer.prompts_per_update=128"),
            *("actor.optimizer.lr=2e-3", "actor.optimizer.min_lr=2e-4", "actor.optimizer.decay_steps=250"),
        ),
    ),
}


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Simulate two hosts with a Ray cluster during the block.

    Raises: SystemExit if they cannot be created.
    """
    os.environ["TWO_HOSTS"] = "demo"
    subprocess.run([TWO_HOSTS, "down"], check=False)  # hosts of a demo that was killed
    try:
        for words in (["up"], ["ray", "4"]):
            # Own session: a signal for the demo must not end the hosts before the run has saved.
            code = subprocess.run([TWO_HOSTS, *words], check=False, start_new_session=True).returncode
            if code:
                raise SystemExit(code)
        yield
    finally:
        subprocess.run([TWO_HOSTS, "down"], check=False)


def train(arguments: Sequence[str], on: Sequence[str] = ()) -> None:
    """Run `mcore-rl train` and wait for it. INT and TERM are forwarded: the run saves and stops its processes. If the
    run has received the signal already, as a member of the process group, it counts both as one.

    on: prefix of the command that runs it on a host.

    Raises: SystemExit with the exit code, unless it is 0.
    """
    command = [*on, str(Path(sys.executable).with_name("mcore-rl")), "train", *arguments]
    print(f"$ {shlex.join([*on, 'mcore-rl', 'train', *arguments])}", flush=True)
    started: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        for process in started:
            process.send_signal(number)

    # Installed before the start: a signal in between would end this process and leave the run behind.
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        started.append(subprocess.Popen(command, cwd=ROOT))
        for number in received:  # signals that arrived before the process was in `started`
            started[0].send_signal(number)
        code = started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        # Shells report 128 + the number of the signal.
        raise SystemExit(code if code > 0 else 128 - code)


def is_exported(directory: Path) -> bool:
    """Return whether a complete HF checkpoint exists; the trainer writes it under another name and renames it."""
    # One file, or several with an index.
    weights = ("model.safetensors", "model.safetensors.index.json")
    return (directory / "config.json").is_file() and any((directory / name).is_file() for name in weights)


def is_finished(run: Path) -> bool:
    """Return whether the run has finished all steps of its configuration and validated the last one."""
    import yaml

    # From the run, not from the demo: an override may have changed its number of steps.
    try:
        steps = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["steps"]
    except FileNotFoundError:
        return False
    return any(row.get("step") == steps and "val/accuracy" in row for row in read_metrics(run / "metrics.jsonl"))


def validations(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the rows of validated steps in order; after a resume, the later row of a step counts."""
    # A dict keeps the last row of a step.
    by_step = {row["step"]: row for row in rows if "val/accuracy" in row}
    return [by_step[step] for step in sorted(by_step)]


def curve(rows: Sequence[Mapping[str, float]], measure: str = Demo.measure) -> str:
    """Format the accuracy at every validated step, headed by `measure`; empty without any."""
    lines = [f"{row['step']:>6}  {row['val/accuracy']:.3f}  {'█' * round(40 * row['val/accuracy'])}" for row in rows]
    return "\n".join([f"{'step':>6}  {measure}", *lines] if lines else [])


def closing(demo: Demo) -> str:
    """Return the closing message: paths of the results and how to start again."""
    report = ROOT / demo.run / "report.html"
    lines = [f"run directory  {demo.run}  (metrics.jsonl, rollouts/, timeline.json, tensorboard/, checkpoints/)"]
    if report.exists():
        lines.append(f"report         {demo.run}/report.html")
    lines.append(f"again          rm -r {demo.run}, then the same command (keeps the warm-started model)")
    teacher = [] if demo.teacher is None else [demo.teacher.warm_start_run, demo.teacher.exported]
    lines.append(f"from scratch   rm -r {' '.join([demo.run, demo.warm_start_run, demo.data, *teacher])}")
    return "\n".join(lines)


def warm_start(demo: Demo) -> None:
    """Write the task of a demo and train its random model on it, unless both exist.

    Raises: ConfigError if the run of the warm start belongs to an earlier task.
    """
    written = demo_task.prepare(ROOT / demo.data, demo.task)
    # A model that was warm-started on other problems, or with another tokenizer, would learn nothing.
    if written and (ROOT / demo.warm_start_run).exists():
        raise ConfigError(
            f"{demo.warm_start_run} was trained on an earlier {demo.data}, which has been replaced: remove it"
        )
    print(f"[1/3] problems, tokenizer and a random model: {demo.data} ({'written' if written else 'exists'})")
    if is_exported(ROOT / demo.exported):
        print(f"[2/3] warm start: {demo.exported} exists")
    else:
        print("[2/3] warm start: supervised training of the random model")
        train(demo.warm_start_arguments())


def run_demo(demo: Demo, overrides: Sequence[str] = (), *, engine: str | None = None, hosts: int = 1) -> None:
    """Run all stages of a demo. With overrides, a finished run continues, because they may increase its steps.

    engine: None for the demo's own.
    hosts: 2 simulates two hosts. Another engine and two hosts use separate run directories.

    Raises: ConfigError for invalid overrides, before the warm start.
    """
    started = time.monotonic()
    chosen, run = list(overrides), demo.run
    if hosts == 2:
        overrides, run = [*ON_TWO_HOSTS, *overrides], f"{run}_hosts"
    if engine not in (None, demo.engine):
        overrides, run = [f"rollout.engine={engine}", *overrides], f"{run}_{engine}"
    if run != demo.run:
        overrides = [f"run.dir={run}", *overrides]
    # Parsed here: an invalid override must fail before the warm start, which takes minutes.
    if overrides:
        demo = replace(demo, run=load_config(str(ROOT / demo.config), overrides).run.dir)
    if not chosen and is_finished(ROOT / demo.run):
        print(f"This demo has already run; the results are in {demo.run}.\n")
        print(summary_table(read_metrics(ROOT / demo.run / "metrics.jsonl")))
    else:
        if demo.teacher is not None:
            print(f"teacher: {demo.teacher.exported}")
            warm_start(demo.teacher)
        warm_start(demo)
        print(f"[3/3] {demo.method}: from {demo.exported}" + (", resuming" if (ROOT / demo.run).exists() else ""))
        if hosts == 2:
            with two_hosts():
                train([demo.config, *overrides], on=[TWO_HOSTS, "A"])
        else:
            train([demo.config, *overrides])
        print(f"\ndone in {time.monotonic() - started:.0f} s")
    rows = validations(read_metrics(ROOT / demo.run / "metrics.jsonl"))
    print(f"\n{curve(rows, demo.measure)}\n\n{closing(demo)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Warm start, then DAPO, distillation or DPO on a small task; a few minutes on 2 cores."
    )
    parser.add_argument("--task", choices=sorted(name for name in DEMOS if " " not in name), default="work3")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="async: only with --task work3")
    parser.add_argument(
        "--strategy",
        choices=("megatron", "fsdp2"),
        default="megatron",
        help="fsdp2: transformers' own model, a dense one; only with --task work3 --mode sync",
    )
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="inference engine; default: the demo's")
    parser.add_argument(
        "--hosts", type=int, choices=(1, 2), default=1, help="2: two simulated hosts; needs root on Linux"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for the run after the warm start, such as trainer.steps=10"
    )
    options = parser.parse_args(arguments)
    chosen = [options.mode] * (options.mode != "sync") + [options.strategy] * (options.strategy != "megatron")
    name = " ".join([options.task, *chosen])
    if name not in DEMOS:
        parser.error(f"--mode {options.mode} has no --task {options.task} with --strategy {options.strategy}")
    try:
        run_demo(DEMOS[name], options.overrides, engine=options.engine, hosts=options.hosts)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except FileExistsError as error:  # the task's directory contains something else
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
