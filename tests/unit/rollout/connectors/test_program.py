"""The program of all suites, and the packages of connectors."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.connectors import libraries
from mcore_rl.rollout.connectors.check import SETTINGS, check_rows
from mcore_rl.rollout.connectors.libraries import KINDS
from mcore_rl.rollout.connectors.registry import load_suite
from mcore_rl.rollout.episodes.load import load_episode
from mcore_rl.rollout.gateway.harness.function import FunctionHarness
from mcore_rl.types import EpisodeOutcome
from tests.readme import ROOT
from tests.unit.rollout.connectors.written import SOLVE
from tests.unit.rollout.episodes.conftest import Stage
from tests.unit.rollout.episodes.scripted import END

Play = Callable[..., tuple[Stage, EpisodeOutcome]]


def test_row_without_connector_gets_one_reply_for_graders(play: Play) -> None:
    stage, outcome = play(lambda text: f"so{END}", FunctionHarness(SOLVE, {}), extra_info={"level": 1})
    assert outcome.error is None
    assert outcome.reward is None
    assert stage.trained_text(outcome) == f"so{END}"


def test_row_of_an_environment_fails_with_the_key_to_set(play: Play) -> None:
    part = {"connector": {"kind": "gymnasium"}}
    _, outcome = play(lambda text: f"so{END}", FunctionHarness(SOLVE, {}), extra_info=part)
    assert outcome.error is not None
    assert "set rollout.environment for rows of gymnasium and openenv" in outcome.error


def test_metrics_of_a_function_are_parts_of_the_reward(play: Play) -> None:
    _, outcome = play(lambda text: f"so{END}", FunctionHarness(f"{__name__}:measures", {}))
    assert outcome.error is None
    parts = {name: value for name, value in outcome.parts.items() if not name.startswith("gateway_")}
    assert parts == {"f1": 0.5, "flag": 1.0}


async def measures(row: dict[str, object], base_url: str, api_key: str) -> dict[str, object]:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "q"}])
    return {"score": 1.0, "metrics": {"f1": 0.5, "flag": True, "text": "no number", "none": None}}


def test_extras_of_the_project_have_the_versions_of_connectors() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for kind, library in libraries.LIBRARIES.items():
        assert extras[kind] == [f"{library.package}{library.extras}{library.versions}"]
    assert set(libraries.LIBRARIES) == set(libraries.KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_package_is_named_with_its_installation(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = f"no-such-{kind}"
    monkeypatch.setitem(libraries.LIBRARIES, kind, libraries.Library(package, ">=1"))
    monkeypatch.setattr("mcore_rl.rollout.connectors.registry.load_suite", None)
    assert main(["rows", kind, "name", "--out", str(tmp_path / "rows.jsonl")]) == 2
    expected = f"error: the package {package} is not installed; install it with `pip install 'mcore-rl[{kind}]'`"
    assert capsys.readouterr().err.startswith(expected)


def test_unsupported_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.LIBRARIES, "verifiers", libraries.Library("pytest", ">=1,<2"))
    with pytest.raises(ConfigError, match=r"the connector needs pytest>=1,<2; install it with .pip install 'mcore-rl"):
        libraries.check_library("verifiers")


@pytest.mark.parametrize("kind", KINDS)
def test_package_that_does_not_import_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(libraries.LIBRARIES, kind, libraries.Library("pytest", ">=1", ("broken_package",)))
    monkeypatch.delitem(sys.modules, f"mcore_rl.rollout.connectors.{kind}", raising=False)
    load_suite.cache_clear()
    assert main(["rows", kind, "name", "--out", str(tmp_path / "rows.jsonl")]) == 2
    message = capsys.readouterr().err
    assert "does not import: ModuleNotFoundError: No module named 'no_such_dependency'; install it with" in message


def test_options_of_environments_are_rejected_for_suites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "rows.jsonl")
    assert main(["rows", "verifiers", "name", "--prompt", "Play.", "--out", out]) == 2
    assert "--prompt and --actions have no effect on verifiers" in capsys.readouterr().err
    Path(out).write_text("kept")
    assert main(["rows", "verifiers", "name", "--out", out]) == 2
    assert Path(out).read_text() == "kept"


GYMNASIUM = SETTINGS["gymnasium"].partition("=")[2]
"""Environment class of Gymnasium's rows."""


@pytest.mark.parametrize(
    ("kinds", "rollout", "message"),
    [
        (["verifiers"], {}, f"data.train has rows of verifiers, which no key plays; set .*{SOLVE}"),
        (["openenv"], {"environment": GYMNASIUM}, "data.train has rows of openenv, which .* does not play"),
        (["gymnasium"], {"episode": "gateway", "harness": SOLVE}, f"set rollout.environment={GYMNASIUM}"),
        (
            ["none", "inspect"],
            {"episode": "gateway", "harness": SOLVE},
            "rows of inspect: the package gone is not inst",
        ),
    ],
)
def test_rows_without_their_connector_are_rejected(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], rollout: dict[str, str], message: str
) -> None:
    monkeypatch.setitem(libraries.LIBRARIES, "inspect", libraries.Library("gone", ">=1"))
    rows = [{}, {"connector": "usb"}, *({"connector": {"kind": kind}} for kind in kinds)]
    with pytest.raises(ConfigError, match=message):
        check_rows(RolloutConfig(**rollout), "data.train", rows)


def test_programs_of_users_may_play_any_row() -> None:
    rows = [{"connector": {"kind": kind}} for kind in KINDS]
    check_rows(RolloutConfig(episode="gateway", harness="mine.py:solve"), "data.train", rows)
    check_rows(RolloutConfig(episode="gateway"), "data.train", rows)
    check_rows(RolloutConfig(environment="mine.py:Game"), "data.train", rows)


def test_environment_of_a_missing_package_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.LIBRARIES, "gymnasium", libraries.Library("gone", ">=1"))
    monkeypatch.delitem(sys.modules, GYMNASIUM.partition(":")[0], raising=False)
    with pytest.raises(ConfigError, match=r"^rollout.environment=.*: the package gone is not installed; install it"):
        load_episode(RolloutConfig(environment=GYMNASIUM))
