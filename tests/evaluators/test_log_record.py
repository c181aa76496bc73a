"""A log goes on only under the settings that its rows were made with, whichever field it is."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_collections
import pytest

from configs import common
from qrag_jax import saved_config
from qrag_jax.errors import InputError
from qrag_jax.evaluators.log_record import (
    BEAM_FIELDS,
    FREE_FIELDS,
    LATER,
    PREFIX,
    Retriever,
    is_free,
    log_record,
)
from qrag_jax.metrics import retrieval_log
from qrag_jax.saved_run import SavedRun

BEST = Retriever("best-6", "ab12")
# What a folder settles: the record has what the encoder does, not what the config asks for.
SETTLED = ("encoder.pooling", "encoder.normalise", "encoder.scale")
# Found by an audit to return old rows silently.
FOUND = (
    *("env.never_terminate", "env.positions", "env.sort_by_index", "env.stop_action"),
    *("reward.penalize_extra_steps", "pqn.gamma", "policy.alpha", "data.max_question_tokens"),
)
NAMES = sorted(saved_config.flat(common.get_config().to_dict()))


@pytest.fixture(scope="module")
def run(finished_run: Path) -> SavedRun:
    return SavedRun.open(finished_run, saved_config.load_config(finished_run / "config.json"))


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.5 if math.isinf(value) else value + 0.5
    if isinstance(value, str):
        return value + "x"
    return (*value, "more") if isinstance(value, tuple) else 0.25


def changed(run: SavedRun, name: str) -> SavedRun:
    config = ml_collections.ConfigDict(run.config.to_dict())
    with config.ignore_type():
        config.update_from_flattened_dict({name: other(run.config[name])})
    return dataclasses.replace(run, config=config)


def begin(log: Path, run: SavedRun, planned: bool) -> None:
    retrieval_log.check_meta(log, log_record(run, BEST, "4 questions", planned=planned), LATER)


@pytest.mark.parametrize("planned", [False, True])
def test_every_field_that_changes_a_row_is_named(
    run: SavedRun, planned: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    begin(log, run, planned)
    assert set(FOUND) <= set(NAMES)
    free = FREE_FIELDS if planned else (*FREE_FIELDS, *BEAM_FIELDS)
    for name in NAMES:
        if name.startswith("data.sources") or name in SETTLED:
            continue
        if is_free(name, free):
            assert name not in FOUND
            begin(log, changed(run, name), planned)
            continue
        with pytest.raises(InputError) as refused:
            begin(log, changed(run, name), planned)
        assert f"begun with other settings, config.{name} (was " in str(refused.value)
        assert "--restart" in str(refused.value)
        assert "), " not in str(refused.value)  # nothing else is named
    with pytest.raises(InputError, match=r"config\.env\.never_terminate \(was true, now false\)"):
        begin(log, changed(run, "env.never_terminate"), planned)
    with pytest.raises(InputError, match=r"config\.data\.sources\.hotpotqa \(was 1\.0, now 1\.5\)"):
        begin(log, changed(run, "data.sources.hotpotqa"), planned)


def test_few_fields_are_free() -> None:
    """A field that comes later is in the record, unless somebody shows that it changes no row."""
    assert {name for name in NAMES if is_free(name)} - {
        name for name in NAMES if name.startswith(("llm.", "train.", "runtime."))
    } == {
        *("profile", "seed", "data.cache", "data.workers"),
        *("eval.batch_size", "eval.samples", "eval.best_by"),
        *("reward.prompt", "reward.scale", "reward.staleness", "reward.max_failure_share"),
    }
    assert set(BEAM_FIELDS) == {"eval.beam", "eval.beam_score", "eval.stop_threshold"}


@pytest.mark.parametrize(
    ("name", "value"), [("pooling", "cls"), ("normalise", True), ("scale", 3.0)]
)
def test_what_the_folder_settles_is_recorded(
    run: SavedRun, name: str, value: object, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    begin(log, run, planned=False)
    encoder = dataclasses.replace(run.loaded.encoder, **{name: value})
    loaded = dataclasses.replace(run.loaded, encoder=encoder)
    with pytest.raises(InputError, match=rf"config\.encoder\.{name} \(was "):
        begin(log, dataclasses.replace(run, loaded=loaded), planned=False)


def test_other_weights_and_other_questions_are_refused(run: SavedRun, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    begin(log, run, planned=False)
    for retriever, samples, says in (
        (Retriever("best-7", "ab12"), "4 questions", r'encoder \(was "best-6", now "best-7"\)'),
        (Retriever("best-6", "cd34"), "4 questions", r'weights \(was "ab12", now "cd34"\)'),
        (BEST, "5 questions", r'samples \(was "4 questions", now "5 questions"\)'),
    ):
        with pytest.raises(InputError, match=says):
            retrieval_log.check_meta(log, log_record(run, retriever, samples, planned=False))
    trained, untrained = run.trained("last")[0], run.untrained()
    assert Retriever.of("x", trained) == Retriever.of("x", run.trained("last")[0])
    assert Retriever.of("x", trained) != Retriever.of("x", untrained)


def test_a_log_of_an_older_version_is_refused_in_one_sentence(
    run: SavedRun, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    old = {"encoder": "best-6", "samples": "4 questions", "max_steps": 2, "max_chunk_tokens": 48}
    retrieval_log.meta_path(log).write_text(json.dumps(old))
    with pytest.raises(InputError) as refused:
        begin(log, run, planned=False)
    assert "was begun by another version, which did not record all the settings" in str(
        refused.value
    )
    assert "--restart" in str(refused.value)


def test_a_field_that_came_after_the_log_has_the_value_that_kept_it_as_it_was(
    run: SavedRun, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    record = log_record(run, BEST, "4 questions", planned=True)
    later = "env.stop_action"
    assert later in saved_config.LATER_FIELDS
    json.dumps(record, allow_nan=False)  # for readers that are not Python's
    del record[PREFIX + later]
    retrieval_log.check_meta(log, record)
    begin(log, run, planned=True)
    with pytest.raises(InputError, match=r"config\.env\.stop_action \(was false, now true\)"):
        begin(log, changed(run, later), planned=True)
