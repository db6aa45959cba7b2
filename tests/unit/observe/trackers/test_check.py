"""Trackers that cannot work are reported before the run starts."""

from __future__ import annotations

import pytest

from mcore_rl.config.observe import TRACKERS as NAMES
from mcore_rl.config.observe import ObserveConfig
from mcore_rl.errors import ConfigError
from mcore_rl.observe.trackers import check
from mcore_rl.observe.trackers.check import check_observers
from mcore_rl.observe.trackers.registry import TRACKERS


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Installed version by module; initially the oldest supported one, without any login."""
    installed: dict[str, str | None] = {kind.module: kind.minimum for kind in TRACKERS.values()}
    monkeypatch.setattr(check, "installed_version", lambda kind: installed[kind.module])
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return installed


def test_registry_has_exactly_the_trackers_of_the_schema() -> None:
    assert set(TRACKERS) == set(NAMES)


def test_check_default_trackers_pass() -> None:
    check_observers(ObserveConfig())


def test_check_missing_and_old_packages_are_in_one_message(versions: dict[str, str | None]) -> None:
    versions |= {"wandb": None, "mlflow": "2.9"}
    with pytest.raises(ConfigError) as raised:
        check_observers(ObserveConfig(trackers=["wandb", "mlflow"], trackers_offline=True))
    message = str(raised.value)
    assert 'observe.trackers: wandb is not installed; run `pip install "wandb>=' in message
    assert 'mlflow 2.9 is too old; run `pip install "mlflow-skinny>=3' in message
    assert "or leave wandb out of observe.trackers" in message


def test_check_without_server_names_the_variable_and_offline_mode() -> None:
    with pytest.raises(ConfigError, match=r"mlflow is not logged in; set MLFLOW_TRACKING_URI .*trackers_offline=true"):
        check_observers(ObserveConfig(trackers=["mlflow"]))
    check_observers(ObserveConfig(trackers=["mlflow"], trackers_offline=True))


def test_check_with_server_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_observers(ObserveConfig(trackers=["mlflow"]))


def test_check_tracker_named_twice_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"observe\.trackers names mlflow twice"):
        check_observers(ObserveConfig(trackers=["mlflow", "tensorboard", "mlflow"], trackers_offline=True))
