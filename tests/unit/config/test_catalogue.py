"""`mcore-rl keys` lists every key with the facts and the description of its field."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import mcore_rl
from mcore_rl.cli import main
from mcore_rl.config.catalogue import WIDTH, find_keys
from mcore_rl.config.reading.unknown_keys import known_keys


def test_find_keys_every_key_has_a_description() -> None:
    entries = find_keys()
    assert sorted(entry.key for entry in entries) == known_keys()
    assert [entry.key for entry in entries if not entry.text] == []


def test_keys_json_contains_the_facts_of_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--json"]) == 0
    entries = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["rollout.max_prompt_tokens"] == {
        "key": "rollout.max_prompt_tokens",
        "type": "int",
        "default": 512,
        "required": False,
        "unit": "tokens",
        "range": "at least 1",
        "choices": [],
        "text": "Maximum length of a prompt. Longer prompts are dropped or truncated, see data.long_prompts.",
    }
    assert (entries["model.hf_path"]["default"], entries["model.hf_path"]["required"]) == (None, True)
    assert (entries["run.dir"]["default"], entries["run.dir"]["required"]) == ("runs/{name}-{date}-{time}", False)
    assert entries["critic.optimizer.lr"]["default"] == 1e-5
    assert entries["critic.parallel.etp"]["type"] == "int | None"
    assert entries["actor.recompute"]["choices"] == ["none", "selective", "full"]
    assert entries["reward.function"]["choices"][-1] == "module_or_file.py:function"
    assert entries["algorithm.policy_loss.kwargs"]["type"] == "dict[str, Any]"
    units = {key: entry["unit"] for key, entry in entries.items()}
    assert units["plan.memory_bandwidth_gib_per_second"] == "GiB/s"
    assert units["weights.bucket_mib"] == "MiB"
    assert units["trainer.steps"] == "steps"
    assert units["actor.optimizer.warmup_steps"] == "updates"
    assert units["actor.optimizer.lr"] is None


def test_find_keys_word_matches_names_and_starts_of_words() -> None:
    assert {entry.key for entry in find_keys("samples_per")} == {"rollout.samples_per_prompt"}
    assert "actor.optimizer.lr" in {entry.key for entry in find_keys("LR")}
    assert "rollout.samples_per_prompt" in {entry.key for entry in find_keys("group")}  # they form a group
    assert {entry.key for entry in find_keys("poch")} == {"trainer.update_epochs", "critic.update_epochs"}  # no "epoch"


def test_key_entry_fits_into_80_columns() -> None:
    shown = "\n".join(entry.shown() for entry in find_keys())
    assert [line for line in shown.splitlines() if len(line) > WIDTH] == []
    assert (
        "rollout.temperature = 1.0  [float, 0 or more and at most 2]\n    Temperature of sampling for training" in shown
    )
    assert "model.hf_path  [str, required]\n" in shown
    assert "judge.hf_path = null  [str | None]" in shown


def test_keys_unknown_word_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "learning_rte"]) == 2
    assert "no key has 'learning_rte'" in capsys.readouterr().err


def test_keys_closed_pipe_prints_no_traceback() -> None:
    command = f"{sys.executable} -m mcore_rl.cli keys | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_flag_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"mcore-rl {mcore_rl.__version__}\n"
