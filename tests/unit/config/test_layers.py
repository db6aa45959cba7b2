"""Several configuration files: precedence, and errors with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config import load_config
from mcore_rl.config.reading.overrides import parse_override, split_words, with_override
from mcore_rl.errors import ConfigError

BASE = """\
run: {dir: runs/x, seed: 3}
model:
  hf_path: models/x
data:
  train: [a.jsonl, b.jsonl]
trainer:
  steps: 10
  prompts_per_step: 16
slurm:
  environment: {A: one, B: two}
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


def second(tmp_path: Path, text: str) -> str:
    path = tmp_path / "second.yml"
    path.write_text(text)
    return str(path)


def test_load_config_later_file_replaces_only_its_keys(base: str, tmp_path: Path) -> None:
    later = second(tmp_path, "trainer: {steps: 20}\ndata: {train: c.jsonl}\nslurm: {environment: {B: three}}\n")
    config = load_config([base, later], ["run.seed=5"])
    assert (config.trainer.steps, config.trainer.prompts_per_step, config.run.seed) == (20, 16, 5)
    assert config.data.train == ["c.jsonl"]  # a list is replaced
    assert config.slurm.environment == {"A": "one", "B": "three"}  # a mapping is merged
    assert load_config([later, base]).trainer.steps == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  steps: 5\n  stepz: 3\n", r"line 3: unknown key trainer\.stepz; did you mean trainer\.steps\?"),
        ("\n\ntrainer: 3\n", "line 3: trainer is a section"),
        ("trainer:\n\n  steps: many\n", r"line 3: trainer\.steps: "),
        ("model:\n  hf_path: ''\n", r"line 2: model\.hf_path is empty"),
        ("data:\n  plain_template: 1.10\n", r"line 2: data\.plain_template: YAML reads the value as 1\.1"),
        ("trainer: {steps: 1}\ntrainer:\n  steps: no number\n", r"line 3: trainer\.steps: "),  # the last one counts
    ],
)
def test_load_config_error_names_file_and_line(base: str, tmp_path: Path, text: str, message: str) -> None:
    later = second(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^{later}, {message}"):
        load_config([base, later])


def test_load_config_invalid_yaml_names_file_and_line(base: str, tmp_path: Path) -> None:
    later = second(tmp_path, "trainer:\n  steps: [1\n")
    with pytest.raises(ConfigError, match=rf"^{later} is not valid YAML: .*line 3"):
        load_config([base, later])


@pytest.mark.parametrize("text", ["own: &own {own: *own}\n", "data:\n  train: &own [*own]\n", "&own\n? *own\n: 1\n"])
def test_load_config_value_that_contains_itself_is_invalid(base: str, tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"second.yml is not valid YAML: .*line"):
        load_config([base, second(tmp_path, text)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"trainer: {{steps: 0x{'f' * 5000}}}\n", "an integer is too large"),
        ("observe: {profile: {steps: [1, [2]]}}\n", r"line 1: observe.profile.steps\[1\] is a list, not a number"),
        ("data: {train: {a: b}}\n", "line 1: data.train is a mapping, not a list"),
        ("slurm: {environment: [A]}\n", "line 1: slurm.environment is a list, not a mapping"),
        ("trainer.steps: 3\n", "second.yml: files have sections instead of points; write trainer: {steps: ...}"),
        ("actor.optimizer.lr: 1\n", "write actor: {optimizer: {lr: ...}}"),
    ],
)
def test_load_config_value_of_another_form_names_the_key(base: str, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        load_config([base, second(tmp_path, text)])


def test_load_config_alias_repeats_a_value(base: str, tmp_path: Path) -> None:
    text = "data: {train: &files [c.jsonl], val: *files}\n"
    assert load_config([base, second(tmp_path, text)]).data.val == ["c.jsonl"]


def test_load_config_missing_key_names_all_files(base: str, tmp_path: Path) -> None:
    Path(base).write_text("data: {train: t.jsonl}\n")
    later = second(tmp_path, "run: {dir: runs/x}\n")
    with pytest.raises(
        ConfigError, match=rf"^model\.hf_path must be set, in {base}, {later} or on the command line as"
    ):
        load_config([base, later])


@pytest.mark.parametrize(
    ("section", "overrides"),
    [
        ("model: {hf_path: $NO_SUCH/m}", ["model.hf_path=m"]),
        ("data: {val_sets: {a: $NO_SUCH/v}}", ["data.val=v.jsonl"]),
        ("data: {val: $NO_SUCH/v}", ["data.val={a: v.jsonl}"]),
    ],
)
def test_load_config_replaced_path_needs_no_variable(
    section: str, overrides: list[str], base: str, tmp_path: Path
) -> None:
    files = [base, second(tmp_path, f"{section}\n")]
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH is not set"):
        load_config(files)
    assert "NO_SUCH" not in str(load_config(files, overrides))


def test_load_config_unreplaced_path_needs_its_variable(base: str, tmp_path: Path) -> None:
    files = [base, second(tmp_path, "data: {val: $NO_SUCH/v}\n")]
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH is not set"):
        load_config(files, ["data.val_max_prompts=3", "data.train=t.jsonl"])


def test_split_words_separates_files_from_overrides() -> None:
    words = ["runs/lr=3/base.yaml", "trainer.steps=3", "model.yaml", "rollout.tools=tools.yaml", "slurm.yml"]
    files, overrides = split_words(words)
    assert files == ["runs/lr=3/base.yaml", "model.yaml", "slurm.yml"]
    assert overrides == ["trainer.steps=3", "rollout.tools=tools.yaml"]


@pytest.mark.parametrize("words", [["rollout.tools=", "x.yaml"], ["rollout.tools", "=", "x.yaml"]])
def test_split_words_value_after_a_blank_is_no_file(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^write rollout\.tools=x\.yaml without blanks around =$"):
        split_words(["base.yaml", *words])


def test_parse_override_hints_at_the_ending_of_files() -> None:
    with pytest.raises(ConfigError, match=r"'model' must have the form key=value; .* ends with \.yaml$"):
        parse_override("model")


@pytest.mark.parametrize("text", ["runs/x", "a #b", "a: b", "12", "it's", "[x", "ü x", ""])
def test_with_override_round_trips_any_text(text: str) -> None:
    (item,) = with_override(["run.dir=old"], "run.dir", text)
    assert parse_override(item) == {"run": {"dir": text}}


def test_plan_and_slurm_read_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 4}))
    for name, text in (
        ("base.yaml", f"run: {{dir: x}}\nmodel: {{hf_path: {model}}}\ndata: {{train: t.jsonl}}\n"),
        ("slurm.yaml", "slurm: {partition: gpu}\ncluster: {device: cuda, nodes: 2}\n"),
    ):
        (tmp_path / name).write_text(text)
    assert main(["slurm", "--force", "base.yaml", "cluster.nodes=3", "slurm.yaml"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --partition=gpu\n" in script
    assert "#SBATCH --nodes=3\n" in script
    assert "mcore_rl.cli train base.yaml slurm.yaml cluster.nodes=3" in script
    assert main(["plan", "base.yaml", "slurm.yaml", "absent.yaml"]) == 2
    assert "cannot read the configuration absent.yaml" in capsys.readouterr().err
