"""Settings of an engine, and its hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config.roles import ROLLOUT, KeyNames
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.stop_strings import Decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine of rollout_config.tp ranks.

    timeout_seconds: time limit of a call to the ranks.
    name: the engine's name, for messages.
    load_weights: if False, weights are random until the first update.
    capture_routing: completions contain the experts of their tokens.
    hosts: the engine starts the ranks on the first host; the others run `follow`.
    float32_head, float32_router: the model's keys of these names.
    decode: required for requests with stop strings.
    names: names of configuration keys, for messages.
    tokenizer: required for formats of responses.
    """

    model_dir: str | Path
    rollout_config: RolloutConfig
    _: KW_ONLY
    dtype: str
    seed: int
    timeout_seconds: float
    name: str = "engine"
    eos_token_ids: Sequence[int] = ()
    load_weights: bool = True
    capture_routing: bool = False
    float32_head: bool = False
    float32_router: bool = False
    hosts: EngineHosts = ONE_HOST
    decode: Decode | None = None
    names: KeyNames = ROLLOUT
    tokenizer: PreTrainedTokenizerBase | None = None
