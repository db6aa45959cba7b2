"""Messages between the gateway of a host and the engines of that host, over a unix socket.

An engine connects and sends its token; then, as tuples (kind, ...):

    engine  -> gateway    journal path         file with the tokens that the engine samples
                          leave                the engine will sleep: it has aborted all requests without a session
                          open session row     the session may be taken by a program
                          progress entries     new texts of streamed replies: (key, ReplyStart, [TextDelta]) each
                          reply key reply      ChatReply, Refusal, or None if the request was cancelled
                          close session        the episode has ended
    gateway -> engine     call key session request
                          skip session request  a request that was dropped, when a session is played again
                          cancel key
                          reward session reward
                          seen session reply is_seen   whether a client has received a reply
                          ended session end keys replies   HarnessEnd; unanswered requests, and replies, that no
                                               client receives
                          serve key call request   a request without a session, with its ServedCall
                          count key session request   the reply has the number of the prompt's tokens only;
                                               session "": a request without a session

Both ends are processes of this project. Texts of clients are strings inside these objects and are never unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass

FILE = "gateways.json"
"""File in the run directory with the addresses and tokens, for programs that take sessions by themselves."""
JOURNAL, LEAVE, OPEN, PROGRESS, REPLY, CLOSE = "journal", "leave", "open", "progress", "reply", "close"
CALL, SKIP, CANCEL, REWARD, SEEN, ENDED = "call", "skip", "cancel", "reward", "seen", "ended"
SERVE, COUNT = "serve", "count"


@dataclass(frozen=True)
class Refusal:
    """A RefusedError as a message."""

    status: int
    text: str
    code: str | None = None


@dataclass(frozen=True)
class ServedCall:
    """Sampling of a request without a session. Every engine samples the same replies from the same call.

    name: id of the request. journals: files with tokens that engines have sampled for it before they died. An engine
    that left has aborted it, and its tokens are sampled again.
    """

    name: str
    seed: int
    journals: tuple[str, ...] = ()


@dataclass(frozen=True)
class GatewayAddress:
    """Addresses of a gateway.

    socket: path of the unix socket for engines.
    token: first bytes of an engine's connection, and key of POST /sessions.
    url: address for clients, without a path. clients: path of the unix socket for programs in sandboxes.
    """

    socket: str
    token: str
    url: str
    clients: str
