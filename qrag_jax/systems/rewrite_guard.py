"""What the guards of a query rewriter do to its training: end it, or print a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qrag_jax.feedback.rewrite_guards import TELL, Guards, GuardsConfig
from qrag_jax.rollouts.agent_experience import AgentExperience, Playing
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.runtime.run import log

_GUARD, _BATCHES = "guard", "batches"  # in the position of an experience


class RewriteGuard:
    """Looks at updates; see `feedback.rewrite_guards`.

    Attributes:
        ended: why the training ends before its next update; "": it goes on.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self.ended = ""
        self._config, self._guards = config, Guards(config)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that it looks at."""
        return self._config.metrics

    def look(self, metrics: Mapping[str, float]) -> None:
        """Looks at one update, and settles what happens."""
        told = self._guards.look(metrics)
        if told is None:
            return
        if self._config.action == TELL:
            log(f"guard: {told}")
        else:
            self.ended = (
                f"{told} The training ends here, as config.guards.action says; the best checkpoint "
                "is kept. To go on all the same, raise the limit and give the same command."
            )

    def state(self) -> dict[str, Any]:
        """All that it remembers, as JSON has it."""
        return {"counts": self._guards.state()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._guards.restore(saved["counts"])


class GuardedExperience(AgentExperience):
    """An experience that a guard may end; its position has the guard's state, too.

    Args:
        guard: restored from `position`.
        position: what `position` gave of the batches that were learned from; None: nothing was.
        pending: see `AgentExperience`.
    """

    def __init__(
        self,
        order: Any,
        playing: Playing,
        counts: Callable[[], dict[str, float]],
        guard: RewriteGuard,
        *,
        position: Any = None,
        pending: Sequence[Any] = (),
    ) -> None:
        self._guard = guard
        if position:
            guard.restore(position[_GUARD])
        done = int(position[_BATCHES]) if position else 0
        super().__init__(order, playing, counts, done, pending=pending)

    def next(self, state: Any, number: int, stop: StopSignal) -> Any:
        """See `AgentExperience`.

        Raises:
            EndedEarly: the guard ends the training.
            Stopped: as there.
        """
        if self._guard.ended:
            raise EndedEarly(self._guard.ended)
        return super().next(state, number, stop)

    def position(self) -> tuple[Any, list[Any]]:
        """See `AgentExperience`."""
        batches, pending = super().position()
        return {_BATCHES: batches, _GUARD: self._guard.state()}, pending
