"""LeReT stops where tries teach nothing, or the corpus is another one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.errors import InputError
from qrag_jax.feedback.tries import Try
from qrag_jax.runtime.run import Run
from qrag_jax.systems import leret
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.leret_experience import LessonExperience
from qrag_jax.systems.leret_tries import Iteration
from tests.systems.leret_run import (
    FIRST_SFT,
    STOP,
    Trained,
    again,
    weights_of,
)
from tests.systems.query_play import small

pytestmark = pytest.mark.long


def with_tries(trained: Trained, workdir: Path, change: Callable[[Try], Try]) -> LessonExperience:
    """The experience of a run whose first tries are others."""
    experience = again(trained, workdir)
    system, maker = experience._system, trained.system.tries
    found = maker.iteration(1, None, weights_of(trained, FIRST_SFT), STOP)
    changed = found._replace(tries=[change(each) for each in found.tries])

    class Given:
        def iteration(self, *_: Any) -> Iteration:
            return changed

    system.__dict__["tries"] = Given()
    return experience


def test_ties_everywhere_stop_the_run(trained: Trained, tmp_path: Path) -> None:
    def tied(each: Try) -> Try:
        scores = {**each.scores, "recall": 0.5, "ap": 0.25}
        return dataclasses.replace(each, reward=0.25, scores=scores) if each.scored else each

    experience = with_tries(trained, tmp_path, tied)
    with pytest.raises(InputError, match=r"no state of \d+ has pairs: in \d+% all tries are worth"):
        experience.next(trained.states[FIRST_SFT], FIRST_SFT, STOP)


def test_a_metric_that_is_0_everywhere_stops_the_run(trained: Trained, tmp_path: Path) -> None:
    def nothing(each: Try) -> Try:
        scores = dict.fromkeys(each.scores, 0.0)
        return dataclasses.replace(each, reward=0.0, scores=scores) if each.scored else each

    experience = with_tries(trained, tmp_path, nothing)
    with pytest.raises(InputError, match=r"none of \d+ tries with a score found a gold page"):
        experience.next(trained.states[FIRST_SFT], FIRST_SFT, STOP)


def test_a_corpus_that_changes_while_the_run_goes_on(trained: Trained, tmp_path: Path) -> None:
    experience = again(trained, tmp_path)
    system = experience._system
    system.inputs = dataclasses.replace(
        system.inputs, data={**system.inputs.data, "corpus": "0" * 64}
    )
    with pytest.raises(InputError, match=r"the corpus that is searched has changed since the run"):
        experience.next(trained.states[FIRST_SFT], FIRST_SFT, STOP)


def _index(folder: Path, count: int) -> Path:
    """An index of the passages of some training questions, and of the first question of dev."""
    questions = [bridge_question(0, "train", n) for n in range(count)]
    questions.append(bridge_question(0, "dev", 0))
    source = folder / "passages.jsonl"
    rows = [
        {"id": f"{each.id}/{page.id}", "title": page.title, "text": page.text}
        for each in questions
        for page in each.passages
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    shutil.rmtree(folder / "index", ignore_errors=True)
    index_corpus(source, folder / "index", None, IndexSettings(engine="bm25"))
    return folder / "index"


def test_an_index_that_is_built_anew_between_two_starts(tmp_path: Path) -> None:
    index = _index(tmp_path, 2)
    sizes = {
        "questions__bridge_train": 2,
        "questions__bridge_dev": 1,
        "questions__bridge_corpus": 2,
    }
    fields = {**sizes, "search__gold_by": "title"}
    config, workdir = small(search__index=str(index), **fields), tmp_path / "run"
    with Run.open(workdir, 0.0) as run, leret.open_system(config, run) as system:
        assert len(system.inputs.library.corpus) == 30
        assert not (workdir / "search").exists()
        run.checkpoints.save_last(1, system.first_state(), {"data": system.data})
        run.checkpoints.wait()
        _index(tmp_path, 3)
        experience = LessonExperience(system, 0)
        with pytest.raises(InputError, match="the corpus that is searched has changed since the"):
            experience.next(system.first_state(), FIRST_SFT, STOP)
    with Run.open(workdir, 0.0) as run, leret.open_system(config, run) as system:
        assert len(system.inputs.library.corpus) == 40
        with pytest.raises(InputError, match=r"\(corpus\)"):
            run.restore(system.first_state, system.data, {})
    (index / "corpus" / "corpus.json").unlink()
    with (
        Run.open(workdir, 0.0) as run,
        pytest.raises(InputError, match=r"holds no finished corpus: corpus\.json is miss"),
        leret.open_system(config, run),
    ):
        pass
