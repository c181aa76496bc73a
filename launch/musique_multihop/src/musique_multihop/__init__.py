"""Questions that need several documents, with a search tool, as a taskset of verifiers 0.4."""

from __future__ import annotations

from typing import Any

__all__ = ["MusiqueTaskset"]


def __getattr__(name: str) -> Any:
    if name == "MusiqueTaskset":  # needs verifiers, which `questions` does not
        from musique_multihop.v1 import MusiqueTaskset

        return MusiqueTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
