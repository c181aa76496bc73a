"""A signal that comes at a known moment."""

from __future__ import annotations

from qrag_jax.runtime.interrupt import StopSignal


class StopAfter(StopSignal):
    """Asks to stop when it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self._left = looks
        super().__init__()

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0

    @requested.setter
    def requested(self, value: bool) -> None:
        assert not value
