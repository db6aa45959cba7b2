"""Reading of verl's scripts and YAML files: other files are rejected with a message that states what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.errors import ConfigError
from mcore_rl.migration.verl.reader import read_verl
from mcore_rl.migration.verl.translation import translate
from tests.unit.migration.test_verl import PROGRAM, REQUIRED


@pytest.mark.parametrize(
    "text", ["echo hello\n", "python3 train.py --lr 1\n", "python3 -m verl.trainer.main_ppo\n", ""]
)
def test_reader_script_of_something_else_states_what_it_expects(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    with pytest.raises(ConfigError, match="starts no training of verl; expected a verl launch script"):
        read_verl(path, {})


def test_reader_program_that_only_generates_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 -m verl.trainer.main_generation data.path=/a model.path=/b\n")
    with pytest.raises(
        ConfigError, match=r"line 1: verl.trainer.main_generation trains nothing; expected a verl launch"
    ):
        read_verl(path, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", "has none of verl's sections; expected a verl launch script"),
        ("- a\n", "holds no mapping of sections"),
        ("a: [1\n", "is not valid YAML"),
        ("\0", "is not a text file"),
    ],
)
def test_reader_yaml_of_something_else_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_verl(path, {})


def test_reader_missing_base_configuration_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{PROGRAM} --config-name=mine {REQUIRED}\n")
    assert read_verl(path, {}).notes == [
        "--config-name=mine: there is no such file here; add --base FILE to read its values"
    ]
    base = tmp_path / "other.yaml"
    base.write_text("data: {train_batch_size: 48}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 24}}\n")
    _, draft, _ = translate(read_verl(path, {}, base).settings)
    assert (draft.values["trainer.prompts_per_step"], draft.values["trainer.prompts_per_update"]) == (48, 24)
