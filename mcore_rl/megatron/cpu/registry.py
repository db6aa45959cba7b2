"""Named fixes: what each one patches is recorded, so that a test can take a single one back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

_ABSENT = object()


@dataclass
class Fix:
    """One upstream quirk and its repair.

    `module` is the megatron.core module whose import triggers it (without the `megatron.core.` prefix), or None
    for a fix that is put in at installation.
    """

    name: str
    module: str | None
    apply: Callable[[Fix, ModuleType | None], None]
    on_cuda: bool = False
    """Whether it mends what is wrong without TransformerEngine, so with CUDA as well."""
    replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def patch(self, owner: Any, attribute: str, value: Any) -> None:
        """Sets owner.attribute, remembering what was there."""
        # A function's __code__ is a slot, which its __dict__ does not show.
        before = getattr(owner, attribute) if isinstance(owner, FunctionType) else vars(owner).get(attribute, _ABSENT)
        self.replaced.append((owner, attribute, before, value))
        setattr(owner, attribute, value)


FIXES: dict[str, Fix] = {}


def fix(
    name: str, module: str | None = None, *, on_cuda: bool = False
) -> Callable[[Callable[[Fix, Any], None]], Callable[[Fix, Any], None]]:
    """Registers a function as the fix called `name`."""

    def register(apply: Callable[[Fix, Any], None]) -> Callable[[Fix, Any], None]:
        assert name not in FIXES, f"two fixes are called {name!r}"
        FIXES[name] = Fix(name, module, apply, on_cuda)
        return apply

    return register


@contextmanager
def without(name: str) -> Iterator[None]:
    """Takes the fix called `name` back for the length of the block: for tests, and to see whether a newer
    upstream version still needs it. A fix that only acts while modules are imported cannot be undone this way."""
    replaced = FIXES[name].replaced
    assert replaced, f"fix {name!r} has not been applied"
    for owner, attribute, before, _ in reversed(replaced):
        if before is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)
    try:
        yield
    finally:
        for owner, attribute, _, value in replaced:
            setattr(owner, attribute, value)
