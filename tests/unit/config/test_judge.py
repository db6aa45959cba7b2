"""Invalid judge keys are rejected by name; shared code receives the judge's engines as a rollout section."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config import Config, load_config
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.judge import server_key, template_text, validate_judge
from mcore_rl.config.rules.validation import validate
from mcore_rl.errors import ConfigError

GOOD = "judge.template='{prompt} {response}'"


def _validate(config: Config) -> None:
    validate_judge(config.judge, config.rollout, config.model, cuda=config.cluster.device == "cuda")


@pytest.fixture
def judge(base: str) -> str:
    return f"judge.hf_path={Path(base).parent / 'judge'}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"^judge\.template must be set with a judge: "),
        (["judge.template='{prompt} {reponse}'"], r"^judge\.template has no \{response\}"),
        (["judge.template='{response}'"], r"^judge\.template has no \{prompt\}"),
        (["judge.template=nowhere.txt"], r"^judge\.template=nowhere\.txt cannot be read: .*No such file"),
        ([GOOD, r"judge.score_pattern='score (\d+'"], r"^judge\.score_pattern=score \(\\d\+ is not a regular expr"),
        ([GOOD, r"judge.score_pattern='\d+'"], r"^judge\.score_pattern=\\d\+ has 0 groups; put one"),
        ([GOOD, r"judge.score_pattern='(\d+)/(\d+)'"], r"^judge\.score_pattern=\S+ has 2 groups; put one"),
        ([GOOD, "judge.parser=mine.py:f", "judge.score_pattern='(x)'"], r"^judge\.score_pattern=\(x\) has no effect"),
        ([GOOD, "judge.samples=2"], r"^judge\.samples=2 greedy answers .* set judge\.temperature above 0"),
        ([GOOD, "judge.min_score=1", "judge.max_score=1"], r"^judge\.min_score=1\.0 must be below judge\.max_score"),
        ([GOOD, "judge.dtype=int8"], r"^judge\.dtype=int8 must be one of float32, bfloat16, float16, or null"),
        ([GOOD, "judge.tp=3"], r"^judge\.tp=3 must divide the model's 4 attention heads"),
        ([GOOD, "judge.max_prompt_tokens=8000"], r"^judge\.max_prompt_tokens \+ judge\.max_response_tokens = 8512 exc"),
        (
            [GOOD, "judge.engine=sglang", "judge.gpu_memory_fraction=1", "cluster.device=cuda"],
            r"^judge\.gpu_memory_fraction=1 leaves SGLang no memory",
        ),
        ([GOOD, "judge.hf_path=/nowhere"], r"^judge\.hf_path=/nowhere: no config\.json there"),
    ],
)
def test_validate_judge_errors_name_its_keys(base: str, judge: str, overrides: list[str], message: str) -> None:
    config = load_config(base, [judge, *overrides])
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - as a run does it
        validate(config)
        _validate(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["judge.url=host:8000"], r"^judge\.url=host:8000 is not .* a server; write it as http://host:8000/v1"),
        (["judge.url=http://"], r"^judge\.url=http:// is not the address of a server"),
        (["judge.url=http://a/v1", "judge.hf_path=/models/j"], r"^judge\.hf_path=\S+ has no effect with judge\.url"),
        (["judge.url=http://a/v1", "judge.tp=2"], r"^judge\.tp=2 has no effect; set judge\.hf_path instead of judge"),
        (["judge.url=http://a/v1", "judge.engine=vllm"], r"^judge\.engine=vllm has no effect"),
        (["judge.hf_path=/models/j", "judge.max_retries=9"], r"^judge\.max_retries=9 has no effect; set judge\.url"),
        (
            ["judge.url=http://a/v1", "judge.max_prompt_tokens=99"],
            r"^judge\.max_prompt_tokens=99 has no effect; set judge\.tokenizer_path, or leave",
        ),
    ],
)
def test_validate_judge_server_and_engines_exclude_each_other(base: str, overrides: list[str], message: str) -> None:
    config = load_config(base, [GOOD, *overrides])
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - as a run does it
        validate(config)
        _validate(config)


def test_server_key_comes_from_the_environment_only(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(base, [GOOD, "judge.url=http://a/v1", "judge.api_key_variable=JUDGE_KEY"])
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    _validate(config)  # a plan needs none
    with pytest.raises(ConfigError, match=r"^judge\.api_key_variable=JUDGE_KEY: there is no such environment variable"):
        server_key(config.judge)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert server_key(config.judge) == "secret"
    assert "secret" not in str(config)


def test_judge_role_engine_defaults_to_the_rollout(base: str, judge: str) -> None:
    for overrides, engine in (((), "sglang"), (("judge.engine=vllm",), "vllm")):
        config = load_config(base, [judge, GOOD, "rollout.engine=sglang", *overrides])
        assert EngineRole.judge(config.judge, config.rollout, config.model).section.engine == engine


@pytest.mark.parametrize("override", ["judge.weight=2", "judge.tp=2", GOOD, "judge.score_pattern='(x)'"])
def test_validate_judge_keys_without_judge_are_rejected(base: str, override: str) -> None:
    _validate(load_config(base))
    key = override.partition("=")[0].replace(".", r"\.")
    with pytest.raises(
        ConfigError, match=rf"^{key}=.* has no effect; set judge\.hf_path or judge\.url, or leave {key} at"
    ):
        _validate(load_config(base, [override]))


def test_template_text_reads_a_file(base: str, judge: str, tmp_path: Path) -> None:
    (tmp_path / "ask.txt").write_text("Q: {prompt}\nA: {response}\n")
    config = load_config(base, [judge, f"judge.template={tmp_path}/ask.txt"])
    _validate(config)
    assert template_text(config.judge) == "Q: {prompt}\nA: {response}\n"
    config.judge.template = "{prompt} {response} goes to score.txt"
    assert template_text(config.judge) == config.judge.template


def test_judge_role_has_judge_values_in_section_and_model(base: str, judge: str) -> None:
    given = ["judge.tp=2", "judge.max_prompt_tokens=99", "judge.kv_cache_gib=3", "judge.temperature=0.5"]
    config = load_config(base, [judge, GOOD, *given, "model.random_init=true", "model.tokenizer_path=/policy"])
    role = EngineRole.judge(config.judge, config.rollout, config.model)
    assert (role.section.tp, role.section.max_prompt_tokens, role.section.kv_cache_gib) == (2, 99, 3)
    assert role.section.temperature == 0.5
    assert (role.model.hf_path, role.model.tokenizer_path) == (config.judge.hf_path, None)
    assert (role.model.dtype, role.model.random_init) == ("auto", False)
    config.judge.dtype = "bfloat16"
    assert EngineRole.judge(config.judge, config.rollout, config.model).model.dtype == "bfloat16"
    assert (config.rollout.tp, config.model.dtype, config.model.tokenizer_path) == (1, "auto", "/policy")
