"""Where the ranks of one engine are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineHosts:
    """The hosts of one engine, by name, each with as many of its ranks; `index` is this one. They meet at the first's
    `address`: its ranks in a collective at `port`; vLLM needs no more, those of SGLang ask for commands at
    `commands_port`, with `key`."""

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
        """Those on this host, of an engine of so many."""
        here = num_ranks // self.num
        return range(self.index * here, (self.index + 1) * here)


ONE_HOST = EngineHosts()
