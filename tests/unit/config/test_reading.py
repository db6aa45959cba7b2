"""Values of files and overrides: spellings of null, `~` and variables in paths, bytes that are not UTF-8."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config import Config, load_config
from mcore_rl.config.fields import leaves, make_paths_absolute
from mcore_rl.config.load import as_yaml
from mcore_rl.errors import ConfigError

REQUIRED = ("run.dir", "model.hf_path", "data.train")
LEAVES = list(leaves(Config()))
NULLABLE = [leaf.key for leaf in LEAVES if leaf.may_be_null and leaf.key not in ("data.val_sets", "rollout.history")]
PATHS = [leaf for leaf in LEAVES if leaf.domain.path and leaf.key not in ("data.weights", "data.val_sets")]
FUNCTIONS = [leaf.key for leaf in LEAVES if leaf.domain.function and isinstance(leaf.value, str | None)]


@pytest.fixture
def minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", "/data/place")
    path = tmp_path / "config.yaml"
    path.write_text("run: {dir: runs/x}\nmodel: {hf_path: models/x}\ndata: {train: train.jsonl}\n")
    return str(path)


def with_keys(minimal: str, keys: dict[str, str]) -> Config:
    """Load a configuration file with these keys, each with the text of its value."""
    sections: dict[str, list[str]] = {}
    for key, text in ({"run.dir": "x", "model.hf_path": "x", "data.train": "x"} | keys).items():
        sections.setdefault(key.rpartition(".")[0], []).append(f"{key.rpartition('.')[2]}: {text}")
    tree = "\n".join(_nested(sections, ""))
    Path(minimal).write_text(tree)
    return load_config(minimal)


def _nested(sections: dict[str, list[str]], prefix: str) -> list[str]:
    names = dict.fromkeys(each.removeprefix(prefix).split(".")[0] for each in sections if each.startswith(prefix))
    lines = []
    for name in filter(None, names):
        inside = [*sections.get(prefix + name, []), *_nested(sections, f"{prefix}{name}.")]
        lines += [f"{name}:", *(f"  {line}" for line in inside)]
    return lines


def value(config: Config, key: str) -> object:
    return next(leaf.value for leaf in leaves(config) if leaf.key == key)


@pytest.mark.parametrize("spelling", ["None", "none", "NONE", "null", "Null", "~", "", "''", '""'])
def test_load_config_nullable_key_reads_each_spelling_as_null(minimal: str, spelling: str) -> None:
    config = with_keys(minimal, dict.fromkeys(NULLABLE, spelling))
    texts = [key for key in NULLABLE if value(config, key) is not None]
    assert texts == []


def test_load_config_null_spellings_in_files_match_overrides(minimal: str, tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    path.write_text(
        Path(minimal).read_text() + "reward: {weighted: [{function: gsm8k, name: None}], accuracy_of: ''}\n"
    )
    config = load_config(str(path), ["algorithm.policy_loss.kwargs={a: None, b: [none]}"])
    assert (config.reward.weighted[0].name, config.reward.accuracy_of) == (None, None)
    assert config.algorithm.policy_loss.kwargs == {"a": None, "b": [None]}


def test_load_config_quoted_none_stays_text_and_comes_back(minimal: str, tmp_path: Path) -> None:
    config = load_config(minimal, ['data.system_prompt="None"', "data.prompt_key='none'", "slurm.container=none"])
    assert (config.data.system_prompt, config.data.prompt_key, config.slurm.container) == ("None", "none", "none")
    (tmp_path / "resolved.yaml").write_text(as_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config


@pytest.mark.parametrize("override", [*(f"{key}=None" for key in REQUIRED), "reward.kwargs.x=None", "run.dir=''"])
def test_load_config_null_for_required_text_is_rejected(minimal: str, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")):
        load_config(minimal, [override])


@pytest.mark.parametrize("written", ["~/a b", "$PLACE/a", "${PLACE}/a"])
def test_load_config_path_keys_expand_home_and_variables(minimal: str, tmp_path: Path, written: str) -> None:
    there = {"~/a b": f"{tmp_path}/home/a b"}.get(written, "/data/place/a")
    config = with_keys(minimal, {leaf.key: written for leaf in PATHS})
    for leaf in PATHS:
        assert value(config, leaf.key) == ([there] if "list[" in str(leaf.type) else there), leaf.key


def test_load_config_lists_mappings_and_functions_expand(minimal: str, tmp_path: Path) -> None:
    home = f"{tmp_path}/home"
    config = load_config(
        minimal,
        [
            *(f"{key}=~/mine.py:f" for key in FUNCTIONS),
            "data.train=[~/a.jsonl, '$PLACE/*.jsonl']",
            "data.weights={~/a.jsonl: 2}",
            "reward.functions={gsm8k: ~/mine.py:f}",
            "reward.weighted=[{function: ~/mine.py:f}]",
            "judge.template=~/judge.txt",
            "slurm.container_mounts=[~/d:/d]",
            "slurm.container_image=docker://x",
        ],
    )
    assert {value(config, key) for key in FUNCTIONS} == {f"{home}/mine.py:f"}
    assert config.data.train == [f"{home}/a.jsonl", "/data/place/*.jsonl"]
    assert config.data.weights == {f"{home}/a.jsonl": 2}
    assert config.reward.functions["gsm8k"] == config.reward.weighted[0].function == f"{home}/mine.py:f"
    assert config.judge.template == f"{home}/judge.txt"
    assert (config.slurm.container_mounts, config.slurm.container_image) == ([f"{home}/d:/d"], "docker://x")


@pytest.mark.parametrize(
    ("written", "message"),
    [("$NOWHERE/x", "variable NOWHERE is not set"), ("~nobody_here/x", "no home directory of ~nobody_here")],
)
def test_load_config_path_that_cannot_expand_is_rejected(minimal: str, written: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.dir={message and written.replace('$', '.')}: .*{message}"):
        load_config(minimal, [f"run.dir={written}"])


def test_load_config_oc_env_in_paths_resolves_or_names_variable(minimal: str) -> None:
    """`${NAME}` is replaced before OmegaConf, which must still see its own `${...}`."""
    keys = ["run.dir=${oc.env:PLACE}/a", "data.train=['${oc.env:PLACE}/t', '${PLACE}/u']", "model.hf_path=${run.dir}/m"]
    config = load_config(minimal, keys)
    assert (config.run.dir, config.model.hf_path) == ("/data/place/a", "/data/place/a/m")
    assert config.data.train == ["/data/place/t", "/data/place/u"]
    assert load_config(minimal, ["run.dir=${oc.env:NOWHERE,/d}/a"]).run.dir == "/d/a"
    with pytest.raises(
        ConfigError, match=r"^run\.dir: the environment variable NOWHERE of \$\{oc\.env:NOWHERE\} is not"
    ):
        load_config(minimal, ["run.dir=${oc.env:NOWHERE}/a"])


def test_load_config_existing_name_with_a_dollar_sign_stays(minimal: str, tmp_path: Path) -> None:
    (tmp_path / "$NOWHERE").mkdir()
    assert load_config(minimal, [f"run.dir={tmp_path}/$NOWHERE"]).run.dir == f"{tmp_path}/$NOWHERE"


@pytest.mark.parametrize("override", ["run.dir=/a\udcff", "data.train=b\udcff", "data.system_prompt=\udcff"])
def test_load_config_bytes_that_are_not_utf8_are_rejected(minimal: str, override: str) -> None:
    key = override.partition("=")[0].replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"^{key}.*\\xff is not UTF-8") as caught:
        load_config(minimal, [override])
    str(caught.value).encode()
    with pytest.raises(ConfigError, match=r"CONFIG: x\\xff\.yaml is not UTF-8"):
        load_config("x\udcff.yaml")


def test_make_paths_absolute_working_directory_not_utf8_is_rejected(
    minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(minimal)
    (tmp_path / "d\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "d\udcff")
    with pytest.raises(ConfigError, match=r"^run\.dir: .*d\\xff/runs/x is not UTF-8"):
        make_paths_absolute(config)


def test_load_config_mapping_at_data_val_names_sets(minimal: str, tmp_path: Path) -> None:
    config = load_config(minimal, ["data.val=v.jsonl", "data.val={easy: a.jsonl, hard: [~/b, c]}", "data.val.more=d"])
    home = f"{tmp_path}/home"
    assert config.data.validation == {
        "data.val.easy": ["a.jsonl"],
        "data.val.hard": [f"{home}/b", "c"],
        "data.val.more": ["d"],
    }
    (tmp_path / "resolved.yaml").write_text(as_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config
    assert load_config(str(tmp_path / "resolved.yaml"), ["data.val=v"]).data.validation == {"data.val": ["v"]}
    make_paths_absolute(config)
    assert config.data.validation["data.val.hard"] == [f"{home}/b", f"{Path.cwd()}/c"]


def test_load_config_unknown_reference_in_a_text_is_explained(minimal: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.plain_template: .*refers to another key.*write \\\$\{"):
        load_config(minimal, ["data.plain_template=${x} {prompt}"])


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("foo.bar=1", "the sections are run, model, data"),
        ("trainer.banana=1", "trainer has the keys objective, steps,"),
        ("rollout.zzz.qqq=1", "rollout has the keys"),
        ("actor.optimizer.banana=1", "actor.optimizer has the keys lr,"),
        ("banana.name=1", "the sections are"),
        ("banana={}", "the sections are"),
    ],
)
def test_load_config_key_unlike_any_other_gets_no_suggestion(minimal: str, override: str, keys: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key .*; no key has this name or a similar one \({keys}") as caught:
        load_config(minimal, [override])
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["no", "On", "true", "1.10", "007", "0x10", "1e3", "2026-11-25", "2026-13-45", "!!int x", "04:30:00"]
)
def test_load_config_override_of_a_text_keeps_what_is_written(minimal: str, text: str) -> None:
    config = load_config(minimal, [f"data.system_prompt={text}", f"rollout.stop={text}", f"run.dir={text}"])
    assert (config.data.system_prompt, config.rollout.stop, config.run.dir) == (text, [text], text)
    assert load_config(minimal, ["data.template_kwargs.day=2026-11-25"]).data.template_kwargs == {"day": "2026-11-25"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {system_prompt: no}", "data.system_prompt: YAML reads the value as False; put quotes"),
        ("rollout: {stop: [a, 1.10]}", r"rollout.stop\[1\]: YAML reads the value as 1.1; put quotes"),
        ("rollout: {stop: [{a: 1}]}", r"rollout.stop\[0\] is a mapping, not a text"),
        ("data: {val: [[a]]}", r"data.val\[0\] is a list, not a text"),
        ("trainer: {steps: !!int x}", "not valid YAML"),
        ('data: {system_prompt: "\\ud800"}', r"data.system_prompt: \\ud800 is not UTF-8"),
        ('data: {val: "a\\0b"}', "data.val: .* has a NUL character"),
    ],
)
def test_load_config_value_that_is_no_text_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(str(path), ["run.dir=r", "model.hf_path=m", "data.train=t.jsonl"])
