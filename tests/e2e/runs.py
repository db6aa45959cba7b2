"""Runs of `mcore-rl train` on a tiny task, started like a user does, all their processes, and what they write."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from mcore_rl.weights.transports.hosts import remove_abandoned
from mcore_rl.weights.transports.segments import SHARED_MEMORY
from tests.tiny_models import write_tiny_model

ALPHABET = "0123456789+-*/=;|<>()#.,:? \n_"
RUN_VARIABLE = "MCORE_RL_TEST_RUN"
ENGINE = "ray::EngineProcess"
SECONDS_TO_END = 30
"""Time for a run to end after a fault."""
ONE_RANK = ("actor.parallel.ep=1", "cluster.gpus_per_node=1")
"""Overrides for one trainer rank instead of two, which saves the start of a process."""
SUPERVISED = (*ONE_RANK, "algorithm.policy_loss.name=sft", "algorithm.policy_loss.clip_high=null", "data.val=null")
"""Overrides for supervised training on one rank, which saves the start of an engine too."""

# Random models get different rewards within groups, so gradients are not zero.
REWARD = """
def digits(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if not solution_str:
        return 0.0
    share = sum(c.isdigit() for c in solution_str) / len(solution_str)
    return {"score": share, "acc": float(share > 0.4)}
"""


def write_task(directory: Path, kind: str = "qwen3_moe") -> Path:
    """Write prompts, a character tokenizer, a tiny model, a reward file, and the configuration; return its path. kind:
    the model's type."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    sizes = {"vocab_size": len(vocabulary), "head_dim": 32, "eos_token_id": 1}  # vLLM has no CPU kernel for 16
    model = write_tiny_model(directory / "model", kind, std=0.06, **sizes)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(model)
    rng = random.Random(0)
    for name, count in (("train", 64), ("val", 16)):
        rows = [{"prompt": f"{rng.randrange(1000)}+{rng.randrange(1000)}=", "answer": "1"} for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    config = {
        "run": {"dir": str(directory / "run"), "seed": 3},
        "model": {"hf_path": str(model), "check_logits": "never"},  # test_run covers the check
        "data": {"train": str(directory / "train.jsonl"), "val": str(directory / "val.jsonl"), "template": "plain"},
        "rollout": {"samples_per_prompt": 4, "max_prompt_tokens": 16, "max_response_tokens": 12, "kv_cache_gib": 0.03},
        "reward": {"function": f"{directory / 'reward.py'}:digits", "overlong": {"enable": True, "buffer_tokens": 4}},
        "algorithm": {
            "dynamic_sampling": {"enable": True, "max_batches": 3, "metric": "reward"},
            "policy_loss": {"clip_high": 0.28},
        },
        "actor": {"parallel": {"ep": 2}, "tokens_per_microbatch": 256, "optimizer": {"lr": 1e-3, "warmup_steps": 2}},
        "trainer": {"steps": 4, "prompts_per_step": 8, "prompts_per_update": 4, "validate_every_steps": 2},
        "weights": {"verify_every": 2},
        "checkpoint": {"every_steps": 2},
        # Isolation would depend on other logged-in users and hide ports; tests/e2e/test_run_dir.py covers it.
        "cluster": {"device": "cpu", "gpus_per_node": 2, "object_store_gib": 0.1, "isolation": "none"},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class TrainProcess:
    """An `mcore-rl train` process in its own process group, with its output in a file."""

    config: Path
    run_dir: Path
    overrides: tuple[str, ...] = ()
    log_dir: Path | None = None
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def command(self) -> list[str]:
        return [sys.executable, "-m", "mcore_rl.cli", "train", str(self.config), f"run.dir={self.run_dir}"]

    def __enter__(self) -> TrainProcess:
        self.output = (self.log_dir or self.run_dir.parent) / f"{self.run_dir.name}.{self.token[:6]}.log"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*self.command(), *self.overrides],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment | {RUN_VARIABLE: self.token, "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in [self.process, *self.processes()]:
            process.kill()
        self.process.wait()

    def text(self) -> str:
        return self.output.read_text()

    def finish(self, seconds: float = 240) -> int:
        """Wait for the exit code; fail with the run's output and stacks on a timeout."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.where_it_is()}") from None

    def where_it_is(self) -> str:
        """Abort the run; return its output and the stacks of its processes."""
        said = [self.text()[-4000:]]
        for process in [self.process, *self.processes()]:
            with contextlib.suppress(OSError, psutil.Error):
                process.send_signal(signal.SIGABRT)
        time.sleep(2)
        for log in [self.output, *sorted((self.run_dir / "logs").rglob("*.log"))]:
            _, _, stacks = log.read_text(errors="replace").partition("Fatal Python error: Aborted")
            frames = [line for line in stacks.splitlines() if "<frozen importlib" not in line]
            said.append("\n".join([f"{log.name}:", *frames])[:4000])
        return "\n".join(said)

    def wait_until(self, condition: Callable[[], Any], seconds: float = 180) -> Any:
        """Poll until the condition holds, every 5 ms so that the caller acts within short phases. A search of processes
        takes longer: poll it less often, or it would keep a core busy."""
        deadline = time.monotonic() + seconds
        while True:
            began = time.monotonic()
            if found := condition():
                return found
            code = self.process.poll()
            assert code is None, f"the run ended with code {code} before the condition held:\n{self.text()[-4000:]}"
            assert time.monotonic() < deadline, f"the condition did not hold in {seconds} s:\n{self.where_it_is()}"
            time.sleep(min(0.2, max(0.005, 4 * (time.monotonic() - began))))

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the run's living processes except the driver, regardless of their current parent."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(RUN_VARIABLE) == self.token and process.pid != self.process.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE and title in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def listens_at(self) -> set[str]:
        """Return the IP addresses on which the run's processes listen."""
        connections = [c for process in [self.process, *self.processes()] for c in _connections(process.pid)]
        return {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}

    def sessions(self) -> list[Path]:
        """Return the run's Ray directories in the directories for temporary files."""
        places = {Path(tempfile.gettempdir()), Path("/tmp")}
        return [path for place in places for path in place.glob(f"mcore_rl_{self.process.pid}_*")]

    def kill_one(self, title: str) -> None:
        """Send SIGKILL to one process whose title contains `title`."""
        self.wait_until(lambda: self.processes(title))[0].send_signal(signal.SIGKILL)

    def left_after(self, seconds: float) -> list[str]:
        """Return the run's processes that are still alive after `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in left]


def _connections(pid: int) -> list[Any]:
    try:
        return psutil.Process(pid).net_connections("inet")
    except psutil.Error:  # the process has ended
        return []


def train(config: Path, run_dir: Path, *overrides: str, **environment: str) -> str:
    """Run `mcore-rl train` to its end, with additional environment variables; return the output."""
    with TrainProcess(config, run_dir, overrides, environment=os.environ | environment) as run:
        assert run.finish() == 0, run.text()[-6000:]
        assert not run.left_after(30)
        return run.text()


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of metrics.jsonl by step, without time measurements."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)), f"steps are recorded twice or out of order: {steps}"
    timed = ("time/", "throughput/", "engine/idle_fraction", "engine/requests_stolen")
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(timed)} for row in rows}


def records_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of rollouts/`name`.jsonl."""
    return [json.loads(line) for line in (run_dir / "rollouts" / f"{name}.jsonl").read_text().splitlines()]


def assert_same_records(run_dir: Path, other: Path, *, steps: int | None = None) -> None:
    """Check that two runs have the same files of records. `steps`: only those of the first steps."""
    found, expected = (
        {
            path.name: path.read_text()
            for path in (directory / "rollouts").glob("[!.]*.jsonl")
            if steps is None or int(path.stem.rpartition("_")[2]) <= steps
        }
        for directory in (run_dir, other)
    )
    assert found == expected


def assert_greedy_responses(run_dir: Path, step: int, exported: Path) -> None:
    """Check that the greedy responses of a validation equal transformers' output for the exported weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    records = records_of(run_dir, f"val_step_{step}")
    assert len(records) == 16
    for record in records:
        ids = tokenizer(record["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == record["response"]


def in_step(run: TrainProcess, step: int, phase: str) -> Callable[[], bool]:
    """Return a function that checks by files and process titles whether `step` is in `phase`."""
    rollouts = run.run_dir / "rollouts"
    if phase == "generating":
        calling = in_call(run, ENGINE, "run")

        def generating() -> bool:
            # Call calling() before searching the output: finding processes can take longer than a step.
            text = run.text()
            there = "sending the initial weights to the engines" in text
            return there and calling() and re.search(rf"step +{step - 1}/", text) is not None

        return generating
    if phase == "updating":
        calling = in_call(run, "ray::TrainerProcess", "update")
        # calling() first: finding processes can take longer than the phase.
        return lambda: calling() and (rollouts / f"step_{step}.jsonl").exists()
    if phase == "checkpointing":
        return lambda: (run.run_dir / "checkpoints" / f".step_{step}.partial").exists()
    raise ValueError(phase)


def in_call(run: TrainProcess, kind: str, method: str) -> Callable[[], bool]:
    """Return a function that checks whether a process of this kind is executing the method.

    Calls last 0.1 s, so the processes are found once and only their titles are read afterwards, until one dies.
    """
    known: list[psutil.Process] = []

    def calling() -> bool:
        known.extend([] if known else run.processes(kind))
        try:
            return any(f"{kind}.{method}" in " ".join(process.cmdline()) for process in known)
        except psutil.Error:
            known.clear()
            return False

    return calling


def no_segment_is_left() -> bool:
    """Return whether there is no shared-memory segment of a dead process."""
    return remove_abandoned(SHARED_MEMORY) == []
