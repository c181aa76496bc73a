from __future__ import annotations

import numpy as np

from qrag_jax.feedback.seeded_draws import uniform


def test_a_draw_is_uniform() -> None:
    draws = np.array([uniform("test", (3, number)) for number in range(4000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, 20, (0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 44  # chi-squared, 19 degrees: 0.1 %


def test_a_draw_depends_on_each_part_alone() -> None:
    assert uniform("test", (1, 2)) == 0.9187313531666456
    others = [
        uniform("test", (2, 1)),
        uniform("test", (12,)),
        uniform("test", (1, 2, 0)),
        uniform("other", (1, 2)),
    ]
    assert len({uniform("test", (1, 2)), *others}) == 5
