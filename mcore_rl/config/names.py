"""What a key is called in the role whose model is being checked or built.

Critic, reward model, judge and reference run code that is written for the policy, from sections of their own. A message
of that code says `role_key("actor.parallel.tp")`, and within `role_keys({"actor": "critic"})` that is
critic.parallel.tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_names: ContextVar[tuple[Mapping[str, str], ...]] = ContextVar("role_keys", default=())


def role_key(key: str) -> str:
    """The key of the role in whose place the policy's `key` stands here; `key` itself outside of any role."""
    for names in reversed(_names.get()):
        key = _renamed(key, names)
    return key


@contextmanager
def role_keys(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, in this thread, messages call what lies at a key of `names`, or below one, by its value."""
    token = _names.set((*_names.get(), names))
    try:
        yield
    finally:
        _names.reset(token)


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """The longest part of the key that has another name decides."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        name = names.get(".".join(parts[:end]))
        if name is not None:
            return ".".join([name, *parts[end:]])
    return key
