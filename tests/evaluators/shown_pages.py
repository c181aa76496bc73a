"""For tests of pages: reads one, and makes episodes of tokens to show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.metrics.row_log import OF_PARTS, Prediction
from qrag_jax.rollouts.trajectories import TokenTrajectory, Turn

# Texts that would run, or end what holds them, if a page read them as HTML or JavaScript.
HOSTILE = (
    '</script><script>document.title="ran"</script><!--<script> <img src=x onerror=alert(1)>'
    " &lt;b&gt; \u2028\u2029 '\"`${document.title='ran'} \u202e</pre>"
)
TALLY = {
    **dict.fromkeys(("turns", "searches", "malformed", "unknown_tool", "repeated"), 2),
    **dict.fromkeys(("calls", "failed_calls"), 0),
    **dict.fromkeys(("completed", "truncated"), False),
}


def read_page(file: Path) -> dict[str, Any]:
    """The data in a page: `runs` with their curves, and `sections` of episodes."""
    found = re.search('id="data">(.*)</script>', file.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found[1])


def prediction(number: int = 0, reward: float | None = 0.5, status: str = "done") -> Prediction:
    """An episode of two turns; the tokens' texts are its words."""
    segment, turns = [], []
    for observed, sampled in (([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14])):
        log_probs = -np.arange(1, len(sampled) + 1, dtype=np.float32) / 8
        ids = np.array(observed, np.int32), np.array(sampled, np.int32)
        segment.append(Turn(*ids, log_probs, "stop", ""))
        texts = {"observed_tokens": [f"o{i}\n" for i in observed]}
        texts["sampled_tokens"] = [HOSTILE if i == 13 else f" s{i}" for i in sampled]
        turns.append({"segment": 0, "observed": "", "sampled": "", **texts})
    parts = {} if reward is None else dict.fromkeys(OF_PARTS, 1.0) | {"reward": reward}
    facts = {"tally": TALLY, "answer": HOSTILE, "cited": ["1"], "seen": ["1", "2"]}
    whole = TokenTrajectory(number, 0, 1, (tuple(segment),), status, parts, facts)
    return Prediction(
        id=f"q{number}",
        question=HOSTILE,
        answers=["Right"],
        hops=2,
        draw=0,
        prediction=HOSTILE,
        reward=reward,
        turns=turns,
        trajectory=whole.to_json(),
    )
