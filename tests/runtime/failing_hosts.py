"""`failing_hosts OUT ADDRESS PROCESS`: one of two processes that fail and stop together."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.feedback.llm import metrics_of_all
from qrag_jax.feedback.rewards import sums_of_all
from qrag_jax.llm.outcomes import Answer, Counters, Failure
from qrag_jax.runtime import hosts
from qrag_jax.runtime.hosts import AgreedStop
from qrag_jax.runtime.interrupt import Stopped

LAST = 600


def told(do: Callable[[], object]) -> list[str]:
    """What a call raises: the class and the sentence."""
    try:
        do()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def stopped_before() -> int:
    """The step before which this host stops; a signal reaches the second one alone."""
    with AgreedStop() as stop:
        for step in range(1, LAST):
            try:
                stop.before_step(step)
            except Stopped:
                assert stop.name == "SIGTERM"
                return step
            if step == 5 and jax.process_index():
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
            stop.check()  # between two steps no host stops
            time.sleep(0.01 * (1 + jax.process_index()))
    return LAST


def asked(host: int) -> Counters:
    """What a host asked a language model."""
    counters = Counters()
    for number in range(3 + 4 * host):
        counters.called(Answer("a"), 0.1 * (number + 1) * (1 + host), 1)
    counters.called(Failure("timeout", "late", 1), 9.0, 2)
    return counters


def main() -> None:
    out, number = Path(sys.argv[1]), int(sys.argv[3])
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=number)

    def refuse() -> None:
        raise InputError("no such file.")

    own = (None, FeedbackLost("the model is gone.")), (None, Stopped("SIGTERM"))
    both = InputError(f"host {number}.")
    values = np.array([[1 / 3, np.nan], [number, -0.0]])
    found = {
        "none": told(lambda: hosts.fail_together(None, InputError)),
        "first": told(lambda: hosts.first_does(refuse)),
        "lost": told(lambda: hosts.fail_together(own[0][number], FeedbackLost)),
        "stopped": told(lambda: hosts.fail_together(own[1][number], FeedbackLost)),
        "both": told(lambda: hosts.fail_together(both, FeedbackLost)),
        "exact": [
            each.tobytes() == np.array([[1 / 3, np.nan], [n, -0.0]]).tobytes()
            for n, each in enumerate(hosts.of_each(values))
        ],
        "asked": metrics_of_all(asked(number)),
        "failures": sums_of_all({"own": 1, f"of {number}": 2 + number}),
        "step": stopped_before(),
    }
    (out / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
