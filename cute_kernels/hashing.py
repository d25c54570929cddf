"""Keys of look-ups that every launch makes."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def hashed_once(options: type[T]) -> type[T]:
    """For a frozen dataclass: each object of it works out its hash when first asked, and keeps it. Copies and pickles
    are without it, since another process hashes strings otherwise.
    """
    work_out = options.__hash__

    def __hash__(self: T) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = work_out(self)
        return known

    def __getstate__(self: T) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    options.__hash__ = __hash__  # type: ignore[assignment, method-assign]
    options.__getstate__ = __getstate__  # type: ignore[attr-defined]
    return options
