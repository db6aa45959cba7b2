"""The OpenMetrics endpoint, read by Prometheus' own parsers."""

from __future__ import annotations

import math
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mcore_rl.config.observe import ObserveConfig
from mcore_rl.errors import ConfigError
from mcore_rl.observe.endpoint import MetricsEndpoint, check_address
from mcore_rl.observe.journal import RunJournal
from mcore_rl.runtime.addresses import free_port
from mcore_rl.types import Total

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    with closing(MetricsEndpoint("127.0.0.1", 0, "my run")) as started:
        yield started


def scrape(endpoint: MetricsEndpoint, accept: str = OPEN_METRICS) -> tuple[str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_endpoint_serves_the_last_step_as_open_metrics(endpoint: MetricsEndpoint) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    endpoint.step_finished(1, {"reward/mean": 0.25, "gone": 1.0})
    endpoint.step_finished(2, {"reward/mean": 0.5, "val/accuracy/GSM-8k é": math.nan})
    text, kind = scrape(endpoint)
    assert kind.startswith("application/openmetrics-text")
    found = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {name: [(sample.labels, sample.value) for sample in family.samples] for name, family in found.items()}
    assert samples["mcore_rl_reward_mean"] == [({"run": "my run"}, 0.5)]
    assert found["mcore_rl_reward_mean"].documentation == "reward/mean"
    assert samples["mcore_rl_step"][0][1] == 2
    assert abs(samples["mcore_rl_step_finished_timestamp_seconds"][0][1] - time.time()) < 60
    assert math.isnan(samples["mcore_rl_val_accuracy_GSM_8k__"][0][1])
    assert "mcore_rl_gone" not in samples


def test_endpoint_serves_the_older_text_format_on_request(endpoint: MetricsEndpoint) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    endpoint.step_finished(0, {"val/accuracy": 0.5})
    text, kind = scrape(endpoint, "text/plain")
    assert kind.startswith("text/plain")
    assert {family.name for family in text_string_to_metric_families(text)} >= {
        "mcore_rl_val_accuracy",
        "mcore_rl_step",
    }


def test_endpoint_before_the_first_step_is_empty_and_valid(endpoint: MetricsEndpoint) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    assert list(text_string_to_metric_families(scrape(endpoint)[0])) == []


def test_endpoint_close_frees_the_port_and_its_thread() -> None:
    threads = threading.active_count()
    started = MetricsEndpoint("127.0.0.1", 0, "run")
    started.close()
    assert threading.active_count() == threads
    check_address("127.0.0.1", started.port)


def test_check_address_in_use_names_the_key(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(ConfigError, match=rf"observe.prometheus_port={endpoint.port} cannot be used .*another port"):
        check_address("127.0.0.1", endpoint.port)


def test_check_address_of_another_host_names_the_keys() -> None:
    with pytest.raises(ConfigError, match=r"observe.prometheus_host=192.0.2.1"):
        check_address("192.0.2.1", 9400)


def test_check_address_without_address_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"observe\.prometheus_host=nowhere is no address: Name or service not known"):
        check_address("nowhere", 9400)


def journal(run_dir: Path, port: int) -> RunJournal:
    observe = ObserveConfig(trackers=[], prometheus_port=port, run_name="mine")
    started = RunJournal(run_dir, 2, list, [], observe=observe)
    started.resume_after(-1)
    return started


def test_journal_serves_each_step_until_it_is_closed(tmp_path: Path) -> None:
    port = free_port()
    run = journal(tmp_path, port)
    run.record({"reward/mean": Total(0.5)})
    run.finish_step(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'mcore_rl_reward_mean{run="mine"} 0.5' in answer.read().decode()
    run.close()
    check_address("127.0.0.1", port)


def test_journal_port_taken_since_the_check_is_noted(
    endpoint: MetricsEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = journal(tmp_path, endpoint.port)
    run.finish_step(1)
    run.close()
    assert f"warning: no metrics at observe.prometheus_port={endpoint.port}: " in capsys.readouterr().err
