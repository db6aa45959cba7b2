"""Fast copies of frozen dataclasses."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def changed(instance: T, **fields: object) -> T:
    """Return a copy of a frozen dataclass with other values of some fields, like dataclasses.replace for a class
    without __post_init__.

    `replace` calls __init__, which sets every field of a frozen dataclass with a function call: 3 to 7 us for the tasks
    and scalars of a rollout, of which a step has thousands. This copy takes 1 us.
    """
    unknown = fields.keys() - vars(instance).keys()
    assert not unknown, f"{type(instance).__name__} has no {', '.join(sorted(unknown))}"
    copy = object.__new__(type(instance))
    copy.__dict__.update(vars(instance), **fields)
    return copy
