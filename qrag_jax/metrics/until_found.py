"""The two modes of evaluation, both from one play: `full budget` and `until found`.

Full budget: an episode takes all its steps, as a retriever does that cannot know when it is done.
Until found: it ends with the step at which the last supporting fact is found, as in the test
environments of Q-RAG's public code (griver/Q-RAG, arXiv 2511.07328), whose reward is 1 for that
step, without a penalty or a discount. That looks at the answer key; it is for comparing with
published figures. Greedy play up to a step does not depend on what comes after it, so cutting the
play of the full budget gives exactly the play that ends there.
"""

from __future__ import annotations

import dataclasses

from qrag_jax.metrics.chunk_filters import retrieval_step
from qrag_jax.metrics.retrieval_log import Row

FULL_BUDGET, UNTIL_FOUND = "full budget", "until found"


def until_found(row: Row) -> Row:
    """The row of the episode that ends once all supporting facts are found.

    Its return is 1.0 if they are found, else 0.0.
    """
    missing, steps = set(row.sf_idx), 0
    for index in row.pred_idx:
        if not missing:
            break
        missing.discard(index)
        steps += 1
    return dataclasses.replace(retrieval_step(row, steps), ret=float(not missing))
