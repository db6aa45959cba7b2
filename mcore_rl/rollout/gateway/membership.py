"""Membership of an engine in its host's gateway: only engines that can answer requests are connected."""

from __future__ import annotations

from mcore_rl.config.episodes import SERVING
from mcore_rl.config.rules.rollout import episode_of
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.episodes.player import EpisodePlayer
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.serving import ServedRequests
from mcore_rl.rollout.gateway.wire import GatewayAddress


class GatewayMembership:
    """Connects the episodes of an engine to the gateway of its host. Without episodes of the gateway, all methods do
    nothing.

    address: None for a host without a gateway. journal: file with the tokens that the engine samples.
    """

    def __init__(self, address: GatewayAddress | None, rollout: RolloutConfig, journal: str | None) -> None:
        self._address, self._rollout, self._journal = address, rollout, journal
        self._member: tuple[EpisodePlayer, GatewayEpisode] | None = None
        self._is_admitted = False

    def set_episode(self, player: EpisodePlayer, episode: GatewayEpisode) -> None:
        """Set the engine's player and episode."""
        self._member = player, episode

    def admit(self, *, can_generate: bool) -> None:
        """Connect the engine now or in the next `update` with which it can generate. Its weights have been checked."""
        self._is_admitted = True
        self.update(can_generate=can_generate)

    def update(self, *, can_generate: bool) -> None:
        """Connect an admitted engine if it can generate, unless it is connected. Requests that wait for an engine
        arrive at once, so it must be awake with the published weights."""
        if self._member is None or self._member[1].link is not None or not (self._is_admitted and can_generate):
            return
        assert self._address is not None, "the gateway of the host starts before its engines"
        player, episode = self._member
        serving = ServedRequests(player, episode, self._rollout)
        episode.link = player.run(GatewayLink.connect(self._address, serving, self._journal))

    def sleep(self) -> None:
        """Disconnect a served engine before it sleeps: requests without a session may run at any time. They wait in the
        gateway for an engine. Sessions have ended before."""
        if self._member is None or episode_of(self._rollout) != SERVING:
            return
        player, episode = self._member
        if (link := episode.link) is not None:
            episode.link = None
            player.run(link.close())
