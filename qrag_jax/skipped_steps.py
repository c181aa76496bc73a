"""Steps that learned nothing, since loss or gradient was not finite: counted, told, and limited.

The step itself sees to it that nothing is learned (`learners.pqn.apply_update`); what it tells of
that comes with its metrics, so nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections

SHOWN = 8  # questions named in the sentence of one skipped step


class NotFinite(RuntimeError):
    """Too many steps in a row learned nothing; the message is one sentence for the user."""


def skip_limit(config: ml_collections.ConfigDict) -> int:
    """Skipped steps in a row at which a run stops, 0: never. A run of nothing else stops, too."""
    return min(config.train.max_skipped_steps, config.train.steps)


def skip_line(step: int, questions: Sequence[str], total: int) -> str:
    """What is said when a step is skipped and the one before it was not."""
    return (
        f"step {step}: the loss or its gradient is not finite; nothing is learned from this "
        f"batch ({_some(questions)}); skipped so far: {total}"
    )


def stop_error(
    config: ml_collections.ConfigDict, step: int, in_a_row: int, questions: Sequence[str]
) -> NotFinite:
    """Why the run stops, which of its states are good, and what can be done."""
    dtype = config.encoder.dtype
    since = step - in_a_row
    kept = f"the state after step {since} is kept" if since else "nothing was learned before"
    wider = "" if dtype == "float32" else f"with --config.encoder.dtype=float32 (it is {dtype}), "
    return NotFinite(
        f"the loss or its gradient was not finite in {in_a_row} steps in a row, the last of them "
        f"step {step} (questions {', '.join(questions)}); {kept}, the "
        "checkpoints hold finite numbers alone: begin again in another --workdir with a lower "
        f"--config.optimizer.learning_rate (it is {config.optimizer.learning_rate:g}), {wider}or "
        "without such questions (--config.train.max_skipped_steps=0 never stops)."
    )


def _some(questions: Sequence[str]) -> str:
    more = len(questions) - SHOWN
    named = ", ".join(questions[:SHOWN])
    return f"questions {named}" + (f" and {more} more" if more > 0 else "")
