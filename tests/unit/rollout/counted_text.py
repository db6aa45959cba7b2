"""Text that counts how often it is copied."""

from __future__ import annotations

from typing import Any


class CountedText(str):
    """Text that counts the characters that are copied of it, and the calls of `len`."""

    num_copied = 0
    num_measured = 0

    @classmethod
    def reset(cls) -> None:
        cls.num_copied = cls.num_measured = 0

    def _counted(self, text: str) -> CountedText:
        CountedText.num_copied += str.__len__(text)
        return CountedText(text)

    def __len__(self) -> int:
        CountedText.num_measured += 1
        return str.__len__(self)

    def __getitem__(self, place: Any) -> CountedText:
        return self._counted(super().__getitem__(place))

    def __add__(self, other: str) -> CountedText:
        return self._counted(str.__add__(self, other))

    def __radd__(self, other: str) -> CountedText:
        return self._counted(str.__add__(other, self))

    def rstrip(self, characters: str | None = None) -> CountedText:
        return self._counted(super().rstrip(characters))
