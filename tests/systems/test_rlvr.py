"""RLVR put together: stages, tools, rewards, episodes that a server samples; what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.rlvr import get_config
from examples.worlds.scripts import bridge_question
from qrag_jax.data.sample import Split
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.llm.text.tool_calls import ToolCall
from qrag_jax.retrieval.index_folder import BM25
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems import training
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.rlvr.config import EnvironmentConfig, RlvrConfig, TasksConfig
from qrag_jax.systems.rlvr.system import Rlvr, digest_of
from qrag_jax.systems.scoring import ScoreOptions, score_run
from tests.entry_points import metric_lines
from tests.rollouts.token_setup import PolicyServer, write_calling_model
from tests.support.worlds import write_lines
from tests.systems.small_runs import opened_alone as opened
from tests.systems.small_runs import small_rlvr as small

STOP = StopSignal()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rlvr]:
    with opened(small(), tmp_path_factory.mktemp("rlvr") / "run") as (system, _):
        yield system


def test_easy_questions_come_first_in_a_training(system: Rlvr) -> None:
    hops = [4, 2, 3, 2, 4, 1, 2, 3] * 2
    tasks = zip(system.inputs.train, hops, strict=True)
    train = [dataclasses.replace(task, hops=count) for task, count in tasks]
    config = dataclasses.replace(system.config, tasks=TasksConfig(easy_first=True))
    inputs = dataclasses.replace(system.inputs, train=train)
    easy_first = dataclasses.replace(system, config=config, inputs=inputs)
    first = system.config.plan[0].end
    numbers = np.concatenate([easy_first.questions(first + n)[:, 0] for n in range(16)])
    assert [hops[n] for n in numbers[:16]] == sorted(hops)  # from any step on, as after a resume
    assert [hops[n] for n in numbers[16:]] != sorted(hops)


def test_a_steps_questions_have_the_names_of_its_stage(system: Rlvr) -> None:
    """Whichever step is the latest: the log is a step behind."""
    last = system.config.plan[0].end
    known = [system.inputs.train[0].id]
    assert system.names([0], last) != known == system.names([0], last + 1)


RUBRIC = """
calls = 0

def score(question, answers, answer, parts):
    global calls
    calls += 1
    if calls > 6:  # all of the second batch
        return float("nan")
    if calls % 3 == 0:
        raise RuntimeError("every third call fails")
    return 100 + parts["format"]
"""


def test_adapters_learn_by_a_rubric_of_a_file_and_the_base_stays(tmp_path: Path) -> None:
    """What the rubric fails to score is masked and counted, and has no reward of 0."""
    path = tmp_path / "my_rubric.py"
    path.write_text(RUBRIC)
    fields = {"model__lora__rank": 4, "grpo__beta": 0.1, "rubric__path": f"{path}:score"}
    with opened(small(stages=("grpo",), **fields), tmp_path / "run") as (system, run):
        state, base = system.first_state(), jax.device_get(system.base)
        experience = system.experience(run, STOP)
        after, metrics = system.update(state, experience.next(state, 0, STOP))
        assert 100 <= float(metrics["return"]) <= 101
        assert experience.counts()["unscored_episodes"] == 2
        assert float(metrics["kl"]) == 0
        # A CPU with units for matrices has factors of bfloat16, by dtype=auto.
        assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 1e-2
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(system.base), base)
        with pytest.raises(FeedbackLost, match="6 of 6"):
            experience.next(after, 1, STOP)


SERVED = {"sampling__engine": "server", "llm__model": "m"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stages": ("grpo", "sft")}, "config.stages"),
        ({"grpo__longest": 47}, "config.grpo.longest"),  # 3 turns of 16 tokens
        ({"sampling__room": 900}, "config.sampling.room"),  # beyond the model's positions
        ({"sampling__room": 20}, "config.sampling.room"),  # below a prompt
        ({"tools__tools": ("search", "complete")}, "config.tools.tools"),
        ({"tools__tools": ("retrieve_documents",)}, "config.tools.tools"),  # it could not end
        ({"tools__path": "my_tools.py:f"}, "config.tools.path"),
        ({"tools__path": "none/such.py"}, "none/such.py"),
        ({"stages": ("grpo",), "questions__train": "./no.jsonl,x,train"}, "no.jsonl"),
        ({**SERVED, "llm__url": "http://h/v1"}, "config.model.lora.rank"),
    ],
)
def test_wrong_combinations_are_refused(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match=re.escape(named))
    with refused, opened(small(**fields), tmp_path / "run"):
        pass


def test_verifiers_bring_their_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = get_config("verifiers").unlock()
    config.stages = ("sft", "grpo")
    with pytest.raises(InputError, match="stages"):
        RlvrConfig.of(config)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="verifiers"):
        EnvironmentConfig().interpreter()
    python = tmp_path / ".venv-verifiers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert EnvironmentConfig().interpreter() == str(python)


def test_a_corpus_is_searched_by_all_questions(tmp_path: Path) -> None:
    splits: tuple[Split, ...] = ("train", "train", "dev", "dev")
    tasks = [bridge_task(bridge_question(0, each, n % 2)) for n, each in enumerate(splits)]
    source, index = tmp_path / "passages.jsonl", tmp_path / "index"
    texts = [each.text for task in tasks[:3] for each in task.documents]
    write_lines(source, ({"id": f"p{n}", "text": text} for n, text in enumerate(texts)))
    index_corpus(source, index, None, IndexSettings(engine=BM25))
    fields = {"questions__bridge_train": 2, "questions__bridge_dev": 2, "stages": ("grpo",)}
    with opened(small(search__index=str(index), **fields), tmp_path / "run") as (system, _):
        train, dev = system.inputs.train, system.inputs.dev
        assert [len(task.gold_ids) for task in (*train, *dev)] == [2, 2, 2, 0]
        assert not any(task.documents for task in train)


def test_every_part_of_a_task_counts_for_the_digest() -> None:
    one, two = (bridge_task(bridge_question(0, "train", index)) for index in range(2))
    first, *others = two.documents
    changes: list[dict[str, Any]] = [{"answers": ("1931",)}, {"question": "Who?"}]
    for other in (first._replace(text=""), first._replace(id="x")):
        changes.append({"documents": (other, *others)})
    lists = [[one, dataclasses.replace(two, **each)] for each in changes]
    assert len({digest_of(each) for each in ([one, two], [one], [two, one], *lists)}) == 7


# ---------------------------------------------------------------- sampled by a server

STEPS = 4  # of a training that a server samples


def settings(folder: Path, url: str, **fields: Any) -> Any:
    return small(
        model__path=str(folder),
        model__lora__rank=4,
        # A CPU with units for matrices would have factors of bfloat16, and larger differences.
        model__dtype="float32",
        stages=("grpo",),
        sampling__engine="server",
        sampling__temperature=0.7,
        llm__url=url,
        llm__model="tiny",
        train__steps=STEPS,
        optimizer__learning_rate=1e-2,
        **fields,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[PolicyServer]:
    sampling = RlvrConfig.of(settings(folder, "http://127.0.0.1:1")).sampling
    with PolicyServer.started(folder, sampling) as server:
        yield server


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_batch_is_of_one_version(
    staleness: int, running: PolicyServer, folder: Path, tmp_path: Path
) -> None:
    running.begin()
    config = settings(folder, running.url, tools__staleness=staleness)
    with opened(config, tmp_path / "run") as (system, run):
        state, experience = system.first_state(), system.experience(run, STOP)
        for step in range(STEPS):
            state, metrics = system.update(state, experience.next(state, step, STOP))
            if not staleness:  # strictly on-policy
                assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 1e-2
        counts, asked = experience.counts(), [body["model"] for body in running.asked]
        names, kept = [*running.unloaded, *running.loaded], len(running.loaded)
        first, params = jax.device_get((system.inputs.model.trained, state.params))
    assert counts["llm/failures"] == 0
    assert 0 < counts["llm/handover_seconds"] < 60
    moved = jax.tree.map(lambda one, other: np.abs(one - other).max(), first, params)
    assert max(jax.tree.leaves(moved)) > 1e-3
    published = [name.partition("@")[2].split(".")[0] for name in names]
    assert published == ["check", *map(str, range(STEPS - staleness))]
    assert kept == min(staleness + 2, STEPS - staleness + 1)
    assert len({*asked}) == len(published)
    if not staleness:  # one after the other
        assert asked == sorted(asked, key=[*dict.fromkeys(asked)].index)


# ---------------------------------------------------------------- functions of the user's as tools


# Calls of the functions of examples/tools.py, some of which raise.
STATEMENTS = ("SELECT name FROM cities", "SELECT count(*) FROM cities", "SELECT x FROM y", "DROP")
CALLS = [
    *(ToolCall("calculate", {"expression": f"{n} / {n % 4}"}) for n in range(8)),
    *(ToolCall("look_up", {"sql": statement}) for statement in STATEMENTS),
]


@pytest.fixture
def with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fields of a training with the example's tools, and a database for one of them."""
    with contextlib.closing(sqlite3.connect(tmp_path / "facts.sqlite")) as database, database:
        database.execute("CREATE TABLE cities AS SELECT 'Oslo' AS name")
    monkeypatch.setenv("TOOLS_DATABASE", str(tmp_path / "facts.sqlite"))
    first = jax.devices()[:1]  # for one device programs are compiled sooner
    monkeypatch.setattr(jax, "devices", lambda: first)
    monkeypatch.setattr(jax, "local_devices", lambda: first)
    return {"tools__path": "examples/tools.py", "tools__seconds": 60.0}


def test_a_training_with_functions_counts_their_calls_and_is_scored(
    with_tools: dict[str, Any], tmp_path: Path
) -> None:
    model, run = write_calling_model(tmp_path / "model", more=CALLS), tmp_path / "run"
    config = small(stages=("grpo",), model__path=str(model), **with_tools)
    assert training.train(config, run) == 0
    (*_, last) = [line for line in metric_lines(run) if "train/loss" in line]
    assert last["step"] == 2
    assert 0 < last["tool_failed_calls"] < last["tool_calls"]
    summary = score_run(run, config, ScoreOptions("last", sampled=4, out=tmp_path / "out"))
    for groups in summary["scores"]["bm25"].values():
        assert 0 <= groups["all"]["failed_calls"]["mean"] <= groups["all"]["calls"]["mean"] > 0
    assert not (run / "tools.log").exists()  # nothing was printed
