"""Which parts of an episode are asked about, and which steps the answers reward and keep."""

from __future__ import annotations

from qrag_jax.feedback.completion import Completion, EpisodeRewards
from qrag_jax.feedback.language_model import Unscored

LOST = Unscored("timeout", "too late")


def test_asked_once_the_last_step_has_the_reward() -> None:
    once = Completion()
    assert once.parts([4, 1, 7]) == [[4, 1, 7]]
    assert once.parts([]) == [[]]
    assert once.episodes([0.5, LOST, 1.0, 0.0], [3, 2, 1, 0]) == [
        EpisodeRewards((0.0, 0.0, 0.5), 3),
        LOST,
        EpisodeRewards((1.0,), 1),
        EpisodeRewards((), 0),
    ]


def test_asked_after_every_step_the_threshold_completes() -> None:
    """As the public code does it: rewards below the threshold count, those after it do not."""
    each = Completion(threshold=1.0, ends=True)
    assert each.parts([4, 1, 7]) == [[4], [4, 1], [4, 1, 7]]
    assert each.parts([]) == [[]]
    answers = [0.2, 1.0, 1.0, 0.0, 0.4, 0.0, 2.0, 0.0]
    assert each.episodes(answers, [3, 3, 1, 0]) == [
        EpisodeRewards((0.2, 1.0, 0.0), 2),
        EpisodeRewards((0.0, 0.4, 0.0), 3),
        EpisodeRewards((2.0,), 1),
        EpisodeRewards((), 0),
    ]
    plays_on = Completion(threshold=1.0, ends=False)
    assert plays_on.episodes([0.2, 1.0, 1.0], [3]) == [EpisodeRewards((0.2, 1.0, 0.0), 3)]


def test_a_lost_answer_matters_up_to_completion_alone() -> None:
    each = Completion(threshold=1.0)
    assert each.episodes([0.0, LOST, 1.0], [3]) == [LOST]
    assert each.episodes([1.0, LOST, LOST], [3]) == [EpisodeRewards((1.0, 0.0, 0.0), 1)]
