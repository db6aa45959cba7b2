"""Reward keys without effect, or in contradiction, are rejected with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.fields import check_domains, make_paths_absolute
from mcore_rl.config.load import as_yaml
from mcore_rl.config.rules.models import check_graders
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

SEVERAL = "reward.weighted=[{function: math, weight: 2}, {function: mine.py:short, name: brief, kwargs: {limit: '3'}}]"
WHOLE_STEPS = ["reward.manager=batch", "reward.function=mine.py:f", "reward.batch=step"]


def checked(base: str, overrides: list[str]) -> Config:
    config = load_config(base, overrides)
    check_domains(config)
    check_graders(config.reward, config.rollout)
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["reward.manager=naive"],
        ["reward.manager=dapo"],
        ["reward.manager=dapo", "reward.overlong.enable=true"],
        ["reward.manager=batch", "reward.function=mine.py:f", "reward.batch=task", "reward.workers=4"],
        ["reward.manager=batch", "reward.function=mine.py:f", "reward.batch=step"],
        ["reward.function=by_data_source", "reward.functions={aime*: math, own/data: mine.py:f}"],
        [SEVERAL, "reward.accuracy_of=brief"],
        ["reward.weighted=[{function: by_data_source}]", "reward.functions={mine: gsm8k}"],
    ],
)
def test_check_graders_valid_combinations_pass(base: str, overrides: list[str]) -> None:
    checked(base, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.manager=naive", "reward.workers=2"], r"^reward\.manager=naive .* set reward\.workers=1 or reward"),
        (["reward.manager=naive", "reward.max_concurrent_calls=4"], r"^reward\.max_concurrent_calls=4 has no effect"),
        (["reward.manager=dapo", "reward.overlong.enable=false"], r"^reward\.manager=dapo enables reward\.overlong"),
        (["reward.manager=batch"], r"^reward\.manager=batch .* reward\.function=math does not support; set reward\.f"),
        (["reward.manager=batch", SEVERAL], r"^reward\.manager=batch .* reward\.weighted \(math, mine\.py:short\)"),
        ([*WHOLE_STEPS, "rollout.max_staleness=1"], r"^reward\.batch=step .* rollout\.max_staleness=1 .* set reward"),
        (
            [*WHOLE_STEPS, "rollout.episode=tools", "rollout.tools=tools.yaml"],
            r"^reward\.batch=step .* rollout\.episode=tools; set reward\.batch=group",
        ),
        (["reward.batch=task"], r"^reward\.batch=task has no effect; set reward\.manager=batch"),
        (["reward.functions={a: math}"], r"^reward\.functions=.* has no effect; set reward\.function=by_data_source"),
        (["reward.accuracy_of=a"], r"^reward\.accuracy_of=a has no effect; set reward\.weighted"),
        ([SEVERAL, "reward.function=gsm8k"], r"^reward\.function=gsm8k has no effect with reward\.weighted"),
        ([SEVERAL, "reward.kwargs.a=1"], r"^reward\.kwargs=.* has no effect with reward\.weighted"),
        (["reward.weighted=[{function: none}]"], r"^reward\.weighted\[0\]\.function=none must be one of by_data"),
        (["reward.weighted=[{weight: 2}]"], r"^reward\.weighted\[0\]\.function must be set"),
        (["reward.weighted=[{function: math, wait: 2}]"], r"wait"),
        (
            ["reward.function=by_data_source", "reward.functions={a: maths}"],
            r"^reward\.functions=.*maths.* must be one of math, gsm8k, ",
        ),
        (["reward.kwargs.a=1"], r"^reward\.kwargs=\{'a': '1'\} has no effect: math takes no arguments; leave reward"),
        (["reward.weighted=[{function: gsm8k, kwargs: {a: b}}]"], r"^reward\.weighted\[0\]\.kwargs=.* has no effect"),
        (["reward.manager=fast"], r"^reward\.manager=fast must be one of naive, batch, prime, dapo"),
        (["reward.reward_manager=dapo"], r"unknown key reward\.reward_manager; did you mean reward\.manager"),
    ],
)
def test_check_graders_contradictions_name_the_remedy(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        checked(base, overrides)
    assert "\n" not in str(caught.value)


def test_make_paths_absolute_grader_files_once(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    several = load_config(base, [SEVERAL, "reward.functions={a/b: sub/mine.py:f, c: pack.mine:g, d: math}"])
    make_paths_absolute(several)
    assert [entry.function for entry in several.reward.weighted] == ["math", f"{tmp_path}/mine.py:short"]
    assert several.reward.functions == {"a/b": f"{tmp_path}/sub/mine.py:f", "c": "pack.mine:g", "d": "math"}
    (tmp_path / "resolved.yaml").write_text(as_yaml(several))
    assert load_config(str(tmp_path / "resolved.yaml")).reward == several.reward


def test_punishes_overlong_dapo_unless_set(base: str) -> None:
    cases = {"prime": False, "dapo": True}
    assert {m: checked(base, [f"reward.manager={m}"]).reward.punishes_overlong for m in cases} == cases
    assert checked(base, ["reward.overlong.enable=true"]).reward.punishes_overlong
