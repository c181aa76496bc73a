"""Questions that need several documents, with a search tool: for both protocols of verifiers.

v0 calls `load_environment`; v1 finds the one Taskset in `__all__`. Each is imported when it is
asked for, so that the package needs only the verifiers that is there.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MusiqueTaskset"]


def load_environment(**arguments: Any) -> Any:
    """The environment of verifiers below 0.4; see `settings.Settings` for the arguments."""
    from musique_multihop.v0 import open_environment

    return open_environment(**arguments)


def __getattr__(name: str) -> Any:
    if name == "MusiqueTaskset":
        from musique_multihop.v1 import MusiqueTaskset

        return MusiqueTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
