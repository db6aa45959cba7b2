"""Registry of named fixes. It records what each fix patches, so that a test can undo a single fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import TypeVar

_ABSENT = object()
Apply = TypeVar("Apply", bound=Callable[..., None])


@dataclass
class Fix:
    """A fix for a problem in megatron-core or torch.

    module: megatron.core module after whose import the fix is applied (without the prefix `megatron.core.`); None: the
    fix is applied at installation.
    """

    name: str
    module: str | None
    apply: Callable[..., None]
    on_cuda: bool = False
    """True if the problem is the missing TransformerEngine, so that the fix is also needed with CUDA."""
    replaced: list[tuple[object, str, object, object]] = field(default_factory=list)

    def patch(self, owner: object, attribute: str, value: object) -> None:
        """Set owner.attribute and record the previous value."""
        # __code__ of a function is a slot and not in its __dict__.
        before = getattr(owner, attribute) if isinstance(owner, FunctionType) else vars(owner).get(attribute, _ABSENT)
        self.replaced.append((owner, attribute, before, value))
        setattr(owner, attribute, value)


FIXES: dict[str, Fix] = {}


def fix(name: str, module: str | None = None, *, on_cuda: bool = False) -> Callable[[Apply], Apply]:
    """Register a function as the fix `name`."""

    def register(apply: Apply) -> Apply:
        assert name not in FIXES, f"two fixes have the name {name!r}"
        FIXES[name] = Fix(name, module, apply, on_cuda)
        return apply

    return register


@contextmanager
def without(name: str) -> Iterator[None]:
    """Return a context in which the fix `name` is undone, for tests and to check if a newer upstream version still
    needs it. A fix that acts only during imports cannot be undone this way."""
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
