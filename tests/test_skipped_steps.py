"""A run whose numbers are not finite does not end as if it had learned."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

from configs import hotpotqa
from qrag_jax.skipped_steps import skip_limit, skip_line, stop_error
from qrag_jax.training import Progress
from tests.entry_points import SHARED, Commands, metric_lines, refusal, saved_state


def test_a_run_that_cannot_learn_stops_and_keeps_what_is_good(
    commands: Commands, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    # The first update moves every weight by about 1e30: no loss is finite from then on.
    result = commands.run(
        "train",
        *SHARED,
        f"--workdir={workdir}",
        "--config.optimizer.learning_rate=1e30",
        "--config.train.max_skipped_steps=6",
    )
    text = refusal(result, status=1)
    assert "not finite in 6 steps in a row, the last of them step 7 (questions " in text
    assert "the state after step 1 is kept" in text
    assert "lower --config.optimizer.learning_rate (it is 1e+30)" in text
    assert "--config.encoder.dtype=float32 (it is auto)" in text
    (told,) = [line for line in result.stdout.splitlines() if "nothing is learned" in line]
    assert told.startswith("step 2: ")
    assert told.endswith("skipped so far: 1")
    assert "done: " not in result.stdout
    lines = [line for line in metric_lines(workdir) if "train/loss" in line]
    assert [line["step"] for line in lines][:7] == [*range(1, 8)]
    for line in lines[:7]:
        skipped = line["step"] - 1
        assert line["train/skipped_steps"] == line["train/skipped_in_a_row"] == skipped
        assert (line["train/loss"] is None) == bool(skipped)
        assert line["train/env_steps"] == line["step"] * 16  # time goes on
    # Saved once, at the first checkpoint after the update; the last of them would say no more.
    (saved,) = (workdir / "checkpoints/last").iterdir()
    assert saved.name == "4"
    state = saved_state(workdir, 4)
    assert state["step"] == 4
    assert all(np.isfinite(leaf).all() for leaf in state.values())
    assert max(np.abs(leaf).max() for name, leaf in state.items() if "params" in name) > 1e29
    (best,) = (workdir / "checkpoints/best").iterdir()
    assert best.name == "0"  # what was wrecked is not the best by chance


def test_checkpoints_from_before_the_counts_go_on_at_zero() -> None:
    older = dataclasses.asdict(Progress())
    del older["skipped_steps"], older["skipped_in_a_row"]
    assert Progress(**older) == Progress()


def test_a_short_run_of_nothing_but_skipped_steps_stops_too() -> None:
    config = hotpotqa.get_config("tiny")
    assert (config.train.steps, config.train.max_skipped_steps) == (6, 10)
    assert skip_limit(config) == 6
    config.train.steps = 100
    assert skip_limit(config) == 10
    config.train.max_skipped_steps = 0
    assert skip_limit(config) == 0


def test_sentences_name_some_questions_and_no_dtype_that_is_wide_already() -> None:
    config = hotpotqa.get_config("tiny")
    config.encoder.dtype = "float32"
    ids = [f"q{number}" for number in range(11)]
    assert "(questions q0, q1, q2, q3, q4, q5, q6, q7 and 3 more)" in skip_line(4, ids, 1)
    assert f"(questions {', '.join(ids)})" in str(stop_error(config, 10, 10, ids))
    text = str(stop_error(config, 10, 10, ids[:1]))
    assert "(questions q0); nothing was learned before" in text
    assert "dtype" not in text
    assert len(re.findall(r"[.:] ", text)) == 1
