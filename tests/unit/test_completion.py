"""Completion of verbs, options, files, keys and values, in Python and through bash."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl import cli
from mcore_rl.completion import complete_key, finder

VERBS = (
    *"init train eval serve chat plan slurm debug keys report watch compare doctor".split(),
    *"harness-worker rows import-verl import-slime completion".split(),
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a run and a few files."""
    (tmp_path / "runs").mkdir()
    for name in ("c.yaml", "train.jsonl", "runs.sh"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def completions(line: str) -> list[str]:
    """Return the last word of the line after each completion."""
    words = finder(cli._parser(), cli.options_first)
    texts = itertools.takewhile(lambda text: text is not None, (words.rl_complete(line, i) for i in itertools.count()))
    return [text[line.rfind(" ") + 1 :] for text in texts if text is not None]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("comp", ["compare", "completion"]),
        ("tra", ["train "]),
        ("train --", ["--help", "--dry-run"]),
        ("doctor --sl", ["--slots", "--slow-percent"]),
        ("plan c.yaml rollout.tp=1 --s", ["--suggest "]),
        ("debug ", ["rollout", "train"]),
        ("train ", ["runs/", "c.yaml"]),
        ("report r", ["runs/"]),
        ("import-verl r", ["runs.sh", "runs/"]),
        ("init --train t", ["train.jsonl "]),
        ("doctor --slots ", []),
        ("completion ", ["bash", "zsh", "fish"]),
        ("keys rollout.sw", ["rollout.swap "]),
        ("train c.yaml rollout.sw", ["rollout.swap="]),
        ("train c.yaml actor.lo", [f"actor.lo{end}" for end in ("gprob_chunk_tokens=", "ra.")]),
        ("train c.yaml judge.template", ["judge.template="]),
        ("train c.yaml rollout.swap=", [f"rollout.swap={value}" for value in ("keep", "recompute", "finish")]),
        ("train c.yaml rollout.swap=k", ["rollout.swap=keep "]),
        ("train c.yaml data.shuffle=", ["data.shuffle=true", "data.shuffle=false"]),
        ("train c.yaml judge.engine=", [f"judge.engine={value}" for value in ("vllm", "sglang", "null")]),
        ("train c.yaml data.train=t", ["data.train=train.jsonl "]),
        ("train c.yaml trainer.steps=", []),
        ("train c.yaml no.such.key=", []),
        ("train c.yaml --dry-run rollout.sw", ["rollout.swap="]),
        ("train --dry-run c.yaml a=1 rollout.sw", ["rollout.swap="]),
        ("debug rollout c.yaml rollout.swap=k", ["rollout.swap=keep "]),
    ],
)
def test_line_has_completions(line: str, expected: list[str]) -> None:
    assert sorted(completions(line)) == sorted(expected)


def test_every_verb_is_completed() -> None:
    assert sorted(completions("")) == sorted(VERBS)


def test_key_is_completed_by_one_part_at_a_time() -> None:
    assert "actor." in complete_key("")
    assert not any(name.count(".") > 1 for name in complete_key("", end="="))
    assert {"actor.parallel.", "actor.num_ranks="} <= set(complete_key("actor.", end="="))
    # A single section is never the only completion: the shell would put a blank after it.
    assert set(complete_key("act")) == set(complete_key("actor."))
    assert "actor.parallel.tp" in complete_key("actor.para")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_a_value_after_the_equals_sign(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "mcore-rl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mcore_rl.cli "$@"\n')
    program.chmod(0o755)
    lines = "source <(mcore-rl completion bash)\ncomplete -p mcore-rl\n" + "".join(
        f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_TYPE=9; _python_argcomplete mcore-rl; "
        'printf "<%s>" "${COMPREPLY[@]}"; echo\n'
        for line in ("mcore-rl train c.yaml rollout.swap=", "mcore-rl train c.yaml rollout.sw")
    )
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", lines], env=os.environ | path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    registered, values, keys = done.stdout.splitlines()
    assert registered.endswith("-F _python_argcomplete mcore-rl")
    # Readline has split the word at "=", so that only the part after it is replaced.
    assert values == "<keep><recompute><finish>"
    assert keys == "<rollout.swap=>"
