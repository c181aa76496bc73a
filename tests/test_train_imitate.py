"""Q-RAG's stages: imitation, then PQN, in one run that can be stopped anywhere."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import hotpotqa, own
from qrag_jax import train
from qrag_jax.errors import InputError
from qrag_jax.systems.q_rag import QRag
from qrag_jax.systems.q_rag_config import IMITATE, PQN, QRagConfig
from tests.entry_points import metric_lines, saved_state

IMITATED, STEPS = 3, 6


def config_of(*stages: str, **fields: Any) -> ConfigDict:
    config = hotpotqa.get_config("tiny").unlock()
    config.encoder.scratch.update(layers=1, hidden=16)
    config.encoder.update(length_buckets=1, block_sizes=1)
    config.stages = stages
    config.imitate.update(steps=IMITATED, batch_size=8, learning_rate=1e-3)
    config.train.update(steps=STEPS - IMITATED, eval_every=100, checkpoint_every=100, log_every=1)
    for name, value in fields.items():
        section, _, field = name.partition("__")
        config[section][field] = value
    return config


def test_a_run_stopped_in_either_stage_and_between_them_goes_on_as_if_it_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train.train(config_of(IMITATE, PQN), tmp_path / "whole") == 0
    lines = metric_lines(tmp_path / "whole")
    assert [line["step"] for line in lines if "train/accuracy" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "train/td_error" in line] == [4, 5, 6]
    update, done = QRag.update, {"steps": 0}

    def stopped(self: QRag, state: Any, episodes: Any) -> Any:
        done["steps"] += 1
        if done["steps"] in (2, IMITATED, STEPS - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, state, episodes)

    monkeypatch.setattr(QRag, "update", stopped)
    for _ in range(3):
        assert train.train(config_of(IMITATE, PQN), tmp_path / "run") == 128 + signal.SIGTERM
    assert train.train(config_of(IMITATE, PQN), tmp_path / "run") == 0
    assert done["steps"] == STEPS
    one, other = (saved_state(tmp_path / name, STEPS) for name in ("run", "whole"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_imitation_alone_learns(tmp_path: Path) -> None:
    config = config_of(IMITATE, imitate__steps=60, imitate__batch_size=8)
    assert train.train(config, tmp_path / "run") == 0
    lines = metric_lines(tmp_path / "run")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 60
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:5])


@pytest.mark.parametrize(
    ("stages", "fields", "named"),
    [
        ((), {}, "config.stages"),
        (("sft",), {}, "config.stages"),
        ((PQN, IMITATE), {}, "config.stages"),
        ((IMITATE,), {"imitate__steps": 0}, "config.imitate.steps"),
        ((IMITATE,), {"imitate__temperature": -1.0}, "config.imitate.temperature"),
        ((IMITATE,), {"imitate__shared_by": 3, "env__positions": "none"}, "config.imitate.batch"),
        ((IMITATE,), {"imitate__shared_by": 2, "env__positions": "relative"}, "env.positions"),
        ((IMITATE,), {"data__gold_order": "reverse"}, "config.data.gold_order"),
    ],
)
def test_settings_that_make_no_sense(
    tmp_path: Path, stages: tuple[str, ...], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        train.train(config_of(*stages, **fields), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_questions_without_facts_are_refused(tmp_path: Path) -> None:
    record = {"chunks": ["a is b", "b is c"], "answers": ["c"]}
    records = [record | {"id": str(n), "question": f"Who is {n}?"} for n in range(40)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in records))
    config = own.get_config("tiny").unlock()
    config.data.path, config.stages = str(path), (IMITATE,)
    config.reward.name = "answer_in_chunk"
    with pytest.raises(InputError, match="imitate"):
        train.train(config, tmp_path / "run")


def test_the_order_of_facts_is_that_of_the_data_where_it_is_known() -> None:
    for name, order, known in (
        ("two_wiki", "auto", True),
        ("hotpotqa", "auto", False),
        ("hotpotqa", "data", True),
        ("musique", "any", False),
    ):
        config = config_of(PQN, data__gold_order=order)
        config.data.sources = {name: {"weight": 1.0}}
        assert (name in QRagConfig.of(config).data.ordered) is known
