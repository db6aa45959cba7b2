"""OpenMetrics endpoint with the metrics of the last finished step, for Prometheus."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

PREFIX = "mcore_rl_"
RUN_LABEL = "run"


class MetricsEndpoint:
    """Serves the last step's metrics at http://HOST:PORT/metrics until `close`.

    A metric `reward/mean` is the gauge mcore_rl_reward_mean, whose HELP line has the original name. Two further gauges
    are the step (mcore_rl_step) and the Unix time of its end in seconds (mcore_rl_step_finished_timestamp_seconds).
    Every sample has the label `run`.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        """Start the server in a thread of its own. Port 0: any free port; see `port`.

        Raises: OSError if the address cannot be used.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._values = run, dict[str, tuple[str, float]]()
        # A registry of its own: the global one has metrics about this Python process.
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]  # a Collector by its method `collect`
        self._server, self._thread = start_http_server(port, host, registry)

    @property
    def port(self) -> int:
        return self._server.server_port

    def step_finished(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the served metrics. Values that are not finite are served as NaN or infinity."""
        now = {"step": float(step), "step_finished_timestamp_seconds": time.time()}
        named = {PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", name): (name, float(value)) for name, value in values.items()}
        # One assignment: a scrape sees the metrics of one step only.
        self._values = named | {PREFIX + name: (name, value) for name, value in now.items()}

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the metrics of the last step; the server's threads call it."""
        from prometheus_client.core import GaugeMetricFamily

        for gauge, (name, value) in self._values.items():
            family = GaugeMetricFamily(gauge, name, labels=[RUN_LABEL])
            family.add_metric([self._run], value)
            yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_address(host: str, port: int) -> None:
    """Check that a server can listen at the address.

    Raises: ConfigError naming observe.prometheus_host or observe.prometheus_port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"observe.prometheus_host={host} is no address: {error.strerror}; set it to an address of this host, such "
            "as 127.0.0.1"
        ) from None
    with socket.socket(family, kind, protocol) as listener:
        # The server sets it too: connections of an earlier run that are still closing do not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_port={port} cannot be used at observe.prometheus_host={host}: {error.strerror}; "
                "set another port, or 0 for no endpoint"
            ) from None
