"""Commands import-verl and import-slime: files, exit codes, lists, and the YAML that they write."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("tree_sitter_bash")

from mcore_rl import cli
from mcore_rl.config import load_config
from mcore_rl.config.document import commented_yaml
from mcore_rl.config.fields import leaves
from mcore_rl.migration.draft import Draft

SCRIPTS = Path(__file__).parent / "scripts"
FACTS = ("different meaning", "different defaults, written into the configuration", "without counterpart", "to decide")


def test_command_out_writes_the_file_and_prints_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "config.yaml"
    assert cli.main(["import-verl", str(SCRIPTS / "dapo_32b.sh"), "--out", str(target)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(f"{fact} (" in printed.out for fact in FACTS)
    assert f"next: mcore-rl plan {target}" in printed.out
    assert [path.name for path in target.parent.iterdir()] == ["config.yaml"]


def test_command_without_out_prints_yaml_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import-slime", str(SCRIPTS / "slime_grpo.sh")]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["trainer"]["prompts_per_update"] == 16
    assert "different meaning (" in printed.err


def test_written_lines_name_their_origins(tmp_path: Path) -> None:
    target = tmp_path / "c.yaml"
    cli.main(["import-verl", str(SCRIPTS / "dapo_32b.sh"), "--out", str(target), "--rows", "17000"])
    lines = target.read_text().splitlines()
    assert lines[0] == "# Imported from dapo_32b.sh (line 27, recipe.dapo.main_dapo) by mcore-rl import-verl."
    warmup = "actor_rollout_ref.actor.optim.lr_warmup_steps, line 58: x 16 updates per step of verl's schedule"
    expected = [
        "  samples_per_prompt: 16  # actor_rollout_ref.rollout.n, line 66",
        f"    warmup_steps: 160  # {warmup}",
        "  steps: 33  # trainer.total_epochs, line 89: 1 epochs x 17000 prompts / 512",
    ]
    assert [line for line in expected if line not in lines] == []
    assert [line for line in lines[1:] if not line.endswith(":") and "  # " not in line] == []


@pytest.mark.parametrize("name", ["dapo_32b.sh", "ppo_critic.sh", "tools.sh", "fully_async.sh", "trainer.yaml"])
def test_written_file_loads_to_the_translated_values(name: str, tmp_path: Path) -> None:
    target = tmp_path / "c.yaml"
    assert cli.main(["import-verl", str(SCRIPTS / name), "--out", str(target)]) == 0
    config = load_config(target)
    found = {leaf.key: leaf.value for leaf in leaves(config)}
    written = yaml.safe_load(target.read_text())
    assert found["trainer.prompts_per_step"] == written["trainer"]["prompts_per_step"]
    assert found["actor.tokens_per_microbatch"] == written["actor"]["tokens_per_microbatch"]


def test_document_values_survive_the_round_trip(tmp_path: Path) -> None:
    draft = Draft()
    values: dict[str, object] = {
        "run.dir": "a: b # c",
        "model.hf_path": "None",
        "data.train": ["x", "y z"],
        "data.template_kwargs": {"a": None, "b": "1e3"},
        "rollout.stop": ["\n", "'"],
        "algorithm.policy_loss.clip_low": 3e-4,
        "actor.optimizer.lr": 1e-6,
        "actor.parallel.vpp": 2,
        "slurm.time_limit": "12:00:00",
        "trainer.validate_before": False,
    }
    for key, value in values.items():
        draft.set(key, value, "two\nlines # of text")
    path = tmp_path / "c.yaml"
    path.write_text(commented_yaml(draft.values, draft.origins, "title"))
    found = {leaf.key: leaf.value for leaf in leaves(load_config(path))}
    assert {key: found[key] for key in values} == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.sh"], "cannot read missing.sh: "),
        ([str(SCRIPTS)], "cannot read "),
        ([str(SCRIPTS / "slime_grpo.sh")], "expected a verl launch script"),
        ([str(SCRIPTS / "skypilot.yaml")], "add --set SKYPILOT_NUM_NODES=VALUE"),
        ([str(SCRIPTS / "sft.sh")], "add --set 1=VALUE"),
        ([str(SCRIPTS / "grpo_gsm8k.sh"), "--set", "x"], "--set x must have the form NAME=VALUE"),
        ([str(SCRIPTS / "grpo_gsm8k.sh"), "--rows", "0"], "--rows=0 must be at least 1"),
        ([str(SCRIPTS / "grpo_gsm8k.sh"), "--out", str(SCRIPTS / "sft.sh")], "exists; remove it"),
        ([str(SCRIPTS / "grpo_gsm8k.sh"), "--base", "missing.yaml"], "cannot read missing.yaml"),
    ],
)
def test_command_invalid_input_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["import-verl", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_command_blockers_need_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, target = tmp_path / "run.sh", tmp_path / "c.yaml"
    text = (SCRIPTS / "grpo_gsm8k.sh").read_text()
    script.write_text(
        text.replace("adv_estimator=grpo", "adv_estimator=another_one").replace("=vllm", "=vllm data.video_key=i")
    )
    words = ["import-verl", str(script), "--out", str(target)]
    assert cli.main(words) == 2
    message = capsys.readouterr().err
    assert "algorithm.adv_estimator=another_one (line 5): no counterpart" in message
    assert "data.video_key=i (line 22)" in message
    assert message.endswith("--force leaves such settings out (see docs/migration.md)\n")
    assert not target.exists()
    assert cli.main([*words, "--force"]) == 0
    assert "left out by --force, although they change the training (2):" in capsys.readouterr().out


def test_command_shows_the_rule_that_rejects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import-verl", str(SCRIPTS / "dapo_30b_megatron.sh"), "--out", str(tmp_path / "c.yaml")]
    assert cli.main(words) == 0
    assert "`mcore-rl plan` rejects it until this is changed: actor.parallel.ep=2 x" in capsys.readouterr().out


def test_command_lists_contain_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, text = tmp_path / "run.sh", (SCRIPTS / "grpo_gsm8k.sh").read_text()
    for key, code in (("trainer.unknown_key", 0), ("actor_rollout_ref.actor.policy_loss.loss_mode", 2)):
        override = rf"{key}=$'x\x1b]0;x\a\x1b[2J'"
        script.write_text(text.replace("verl.trainer.main_ppo", f"verl.trainer.main_ppo {override}", 1))
        assert cli.main(["import-verl", str(script)]) == code
        printed = capsys.readouterr()
        assert f"{key}=xU+001B]0;xU+0007U+001B[2J" in printed.err
        assert not {"\x1b", "\x07"} & set(printed.out + printed.err)


@pytest.mark.parametrize("number", ["0", "100", "99999999999999"])
def test_command_set_number_that_is_no_argument_is_rejected(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import-verl", str(SCRIPTS / "grpo_gsm8k.sh"), "--set", f"{number}=x"]) == 2
    assert f"--set {number}=x must have the form" in capsys.readouterr().err
