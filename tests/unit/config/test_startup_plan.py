"""vLLM must not reuse the size of its KV cache from an earlier start on GPUs that trainer ranks share."""

from __future__ import annotations

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rules.rollout import STARTUP_PLAN, check_startup_plan
from mcore_rl.config.rules.validation import validate
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


def config(**changes: str) -> Config:
    made = Config()
    made.cluster.device, made.cluster.placement = "cuda", "colocated"
    for key, value in changes.items():
        section, name = ("rollout", key) if key == "engine" else ("cluster", key)
        setattr(getattr(made, section), name, value)
    return made


def test_startup_plan_with_colocated_engines_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTUP_PLAN, "1")
    with pytest.raises(ConfigError, match=f"{STARTUP_PLAN}=1 .* cluster.placement=colocated .*unset that variable"):
        check_startup_plan(config())


def test_startup_plan_is_checked_where_the_run_starts_only(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTUP_PLAN, "1")
    loaded = load_config(base, ["cluster.device=cuda"])
    with pytest.raises(ConfigError, match=STARTUP_PLAN):
        validate(loaded)
    validate(loaded, run_here=False)


def test_startup_plan_with_a_judge_on_vllm_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTUP_PLAN, "1")
    judged = config(engine="sglang")
    judged.judge.engine = "vllm"
    check_startup_plan(judged)  # no judge: it has no model
    judged.judge.hf_path = "judge"
    with pytest.raises(ConfigError, match=STARTUP_PLAN):
        check_startup_plan(judged)


def test_startup_plan_with_a_teacher_on_engines_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTUP_PLAN, "1")
    taught = config(engine="sglang")
    taught.teacher.hf_path = "teacher"
    check_startup_plan(taught)  # on the actor's ranks
    taught.teacher.num_engines = 1
    with pytest.raises(ConfigError, match=STARTUP_PLAN):
        check_startup_plan(taught)


@pytest.mark.parametrize("changes", [{"placement": "disaggregated"}, {"device": "cpu"}, {"engine": "sglang"}])
def test_startup_plan_of_engines_with_own_memory_is_allowed(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STARTUP_PLAN, "1")
    check_startup_plan(config(**changes))


@pytest.mark.parametrize("value", [None, "", "0"])
def test_startup_plan_that_is_off_is_allowed(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTUP_PLAN, raising=False)
    if value is not None:
        monkeypatch.setenv(STARTUP_PLAN, value)
    check_startup_plan(config())
