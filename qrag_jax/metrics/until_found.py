"""The two modes of evaluation, `full budget` and `until found`, both from one play.

Full budget: an episode takes all its steps, like a retriever that cannot know when it is done.
Until found: the episode ends with the step that finds the last supporting fact, as in the test
environments of Q-RAG's public code (griver/Q-RAG, arXiv 2511.07328). Their reward is 1 for that
step, without a penalty or a discount. This mode looks at the answer key; it exists for comparison
with published figures. Greedy play up to a step does not depend on later steps. So cutting the play
of the full budget gives exactly the play that ends there.
"""

from __future__ import annotations

import dataclasses

from qrag_jax.metrics.chunk_filters import retrieval_step
from qrag_jax.metrics.retrieval_log import Row

FULL_BUDGET, UNTIL_FOUND = "full budget", "until found"


def until_found(row: Row) -> Row:
    """The row of the episode that ends as soon as all supporting facts are found.

    The return is 1.0 if they are all found. Else the row has all its steps and the return 0.0.

    Raises:
        ValueError: the row has no supporting facts.
    """
    if not row.sf_idx:
        raise ValueError(f"sample {row.id} has no supporting facts (sf_idx is empty)")
    missing, steps = set(row.sf_idx), 0
    for index in row.pred_idx:
        if not missing:
            break
        missing.discard(index)
        steps += 1
    return dataclasses.replace(retrieval_step(row, steps), ret=float(not missing))
