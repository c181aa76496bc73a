"""What the original queries find, with which rewritten ones are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document
from qrag_jax.feedback.rewrite_reward import RewriteReward
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.patient_play import Patience

Found = tuple[Document, ...] | Failure


class _Search(NamedTuple):
    """A search as `Patience` takes it."""

    ended: Found


@dataclasses.dataclass
class OriginalQueries:
    """Searches original queries.

    Attributes:
        search: (queries, k) → what the original ones find, best first.
        reward: measures what is found.
        attempts: a search that fails is done again, so often in all.
    """

    search: Callable[[Sequence[RewriteTask], int], list[Found]]
    reward: RewriteReward
    attempts: int

    def __post_init__(self) -> None:
        # By the whole task: ids are unique within a part of the data alone.
        self._measures: dict[RewriteTask, float] = {}

    def found(self, tasks: Sequence[RewriteTask], k: int, patience: Patience) -> list[Found]:
        """What each task's original query finds, best first; few of the searches have failed.

        Args:
            patience: says how many may fail; its `broken` is `Failure`.

        Raises:
            Stopped, FeedbackLost: as for `Patience.play`.
        """
        if not tasks:
            return []
        played = patience.play(tasks, lambda some: [*map(_Search, self._searched(some, k))])
        return [each.ended for each in played]

    def measures(self, tasks: Sequence[RewriteTask], patience: Patience) -> list[float | Failure]:
        """The reward's measure of what each task's original query finds; it is kept.

        Raises:
            Stopped, FeedbackLost: as for `found`.
        """
        new = [each for each in dict.fromkeys(tasks) if each not in self._measures]
        failed: dict[RewriteTask, Failure] = {}
        for task, found in zip(new, self.found(new, self.reward.config.k, patience), strict=True):
            if isinstance(found, Failure):
                failed[task] = found
            else:
                self._measures[task] = self.reward.measure(task, found)
        return [failed[each] if each in failed else self._measures[each] for each in tasks]

    def _searched(self, tasks: Sequence[RewriteTask], k: int) -> list[Found]:
        found = self.search(tasks, k)
        for _ in range(self.attempts - 1):
            places = [n for n, each in enumerate(found) if isinstance(each, Failure)]
            if not places:
                break
            again = self.search([tasks[n] for n in places], k)
            for place, each in zip(places, again, strict=True):
                found[place] = each
        return found
