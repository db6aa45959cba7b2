"""Hosts of an engine whose ranks span several of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineHosts:
    """Hosts of one engine. Every host has the same number of ranks.

    names: names of the hosts; `index` is the host of this process.
    address: address of the first host, which leads.
    port: rendezvous port of the ranks' process group.
    commands_port, key: port and authentication key through which SGLang's ranks receive commands; unused by vLLM.
    """

    names: tuple[str, ...] = ("",)
    index: int = 0
    address: str = ""
    port: int = 0
    commands_port: int = 0
    key: bytes = b""

    @property
    def num(self) -> int:
        return len(self.names)

    def ranks(self, num_ranks: int) -> range:
        """Return the ranks on this host, for an engine of `num_ranks` ranks."""
        # Ranks are numbered host by host.
        here = num_ranks // self.num
        return range(self.index * here, (self.index + 1) * here)


ONE_HOST = EngineHosts()
