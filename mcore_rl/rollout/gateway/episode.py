"""Episode of a program that talks to the gateway: rollout.episode=gateway."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.config.episodes import BY_HARNESS, LAST
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.chat.template import examine
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.limits import EpisodeLimitError
from mcore_rl.rollout.episodes.outcome import EpisodeResult
from mcore_rl.rollout.episodes.session import EpisodePrompt, Sampled, Session
from mcore_rl.rollout.gateway.answers import Answers, ContextOf
from mcore_rl.rollout.gateway.digests import digest_of
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.types.chat import ToolSchema

MAX_CONTEXTS = 256
"""Number of sets of tools whose parsers are kept."""


@dataclass
class GatewayEpisode:
    """Serves a session until its program ends. `link` is set before the first episode."""

    rollout: RolloutConfig
    link: GatewayLink | None = None
    _contexts: dict[bytes, EpisodeContext] = field(default_factory=dict, init=False)

    async def run(self, session: Session, prompt: EpisodePrompt) -> object:
        """Same as Episode.run."""
        assert self.link is not None, "the episodes of an engine start after its connection to the gateway"
        session.begin()  # the program starts now: another engine must not take the episode
        obeys, keeps = self.rollout.gateway_sampling == "request", self.rollout.history != "new_sequence"
        answers = Answers(session, self.context_of(session), obeys, keeps)
        session.extra["harness"] = {}  # graders may read it, also if a limit ends the program
        session.at_limit = functools.partial(self._result, answers, {})
        async with self.link.session(session.id, _row(prompt), answers) as ended:
            end = await ended
        session.extra |= end.extra
        if end.error is not None:
            if (limit := session.limits.reached) is not None:
                # Most programs fail when a request is refused; the limit ends the episode as it ends others.
                raise EpisodeLimitError(limit, end.error)
            raise DataError(end.error)
        result = self._result(answers, _metrics(end.extra))
        if not answers.turns and (missed := answers.counts.missed):
            raise DataError(
                f"its program received no reply, so there is nothing to train on: it closed the connections of all "
                f"{missed} replies before they were sent (gateway_missed={missed}); its client may have a time limit "
                "that is too short"
            )
        return result

    def context_of(self, session: Session) -> ContextOf:
        """Return the function that gives the context for the tools of a session's request."""
        return functools.partial(self._context, session.context)

    def _context(self, context: EpisodeContext, tools: Sequence[ToolSchema] | None) -> EpisodeContext:
        """Return the context for the tools of a request. Equal tools share their parser.

        Raises: RefusedError if the chat template cannot show them, or has no known format of calls.
        """
        offered = list(tools or ())
        if offered == list(context.conversation.tools):
            return context
        key = digest_of(offered)
        if key not in self._contexts:
            if len(self._contexts) >= MAX_CONTEXTS:
                self._contexts.pop(next(iter(self._contexts)))
            try:
                made = context.offering(offered)
                examine(made.conversation, tools=bool(offered), users=False)
            except (ConfigError, DataError) as error:
                raise RefusedError(400, f"the tools cannot be shown to the model: {error}") from error
            self._contexts[key] = made
        return self._contexts[key]

    def _result(self, answers: Answers, metrics: Mapping[str, float]) -> EpisodeResult:
        """Return the reward, the program's metrics and the trained sequences, by rollout.gateway_branches."""
        answers.drop_missed()
        counts = answers.counts
        parts = {
            **metrics,
            "gateway_requests": float(counts.requests),
            "gateway_rewritten": float(counts.rewritten),
            "gateway_missed": float(counts.missed),
        }
        return EpisodeResult(answers.session_reward, parts=parts, sampled=self._trained(answers))

    def _trained(self, answers: Answers) -> list[Sampled] | None:
        """Return turns of the sequences that are trained: only of replies that the program received. None: no reply."""
        if self.rollout.gateway_branches == LAST and answers.last is not None:
            return [answers.last.sampled]
        if self.rollout.gateway_branches == BY_HARNESS and answers.rewarded:
            return [turn.sampled for turn in answers.rewarded]
        return [turn.sampled for turns in answers.turns.values() for turn in turns] or None


def _row(prompt: EpisodePrompt) -> dict[str, object]:
    """Return the fields of a row for its program. The answer is left out: the model may read what its program reads."""
    return {
        "row": prompt.row,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "extra_info": prompt.extra_info,
    }


def _metrics(extra: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of the dict `metrics` that a program returned."""
    harness = extra.get("harness")
    given = harness.get("metrics") if isinstance(harness, Mapping) else None
    if not isinstance(given, Mapping):
        return {}
    return {str(name): float(value) for name, value in given.items() if _is_finite(value)}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
