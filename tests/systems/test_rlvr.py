"""RLVR put together: stages, tools over own documents or a corpus, rewards, and what is refused."""

from __future__ import annotations

import dataclasses
import json
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
from qrag_jax.environments.episode import Look, ToolTask
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.learners.config import PreferenceConfig, SFTConfig, TokenGRPOConfig, TokenPPOConfig
from qrag_jax.policies.tokens import token_scores
from qrag_jax.retrieval.index_folder import BM25, EXACT
from qrag_jax.rollouts.libraries import CorpusLibrary
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.rlvr import Rlvr, digest_of, open_library
from qrag_jax.systems.rlvr_config import EnvironmentConfig, RlvrConfig, TasksConfig, default_config
from tests.systems.corpora import ONE_SHAPE, write_corpus_file, write_tower
from tests.systems.small_runs import opened, opened_run
from tests.systems.small_runs import small_rlvr as small

STOP = StopSignal()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened_run(small(), tmp_path_factory.mktemp("rlvr") / "run") as made:
        yield made


@pytest.fixture
def system(both: Any) -> Rlvr:
    return both[0]


def test_easy_questions_come_first_in_a_training(system: Rlvr) -> None:
    hops = [4, 2, 3, 2, 4, 1, 2, 3] * 2
    tasks = zip(system.inputs.train, hops, strict=True)
    train = [dataclasses.replace(task, hops=count) for task, count in tasks]
    sorted_first = dataclasses.replace(
        system,
        config=dataclasses.replace(system.config, tasks=TasksConfig(easy_first=True)),
        inputs=dataclasses.replace(system.inputs, train=train),
    )
    first = system.config.imitated
    numbers = np.concatenate([sorted_first.questions(first + n).numbers for n in range(16)])
    assert [hops[n] for n in numbers[:16]] == sorted(hops)  # from any step on, as after a resume
    assert [hops[n] for n in numbers[16:]] != sorted(hops)


@pytest.mark.parametrize(
    ("algorithm", "divisor"),
    [(SFTConfig(), 1), (PreferenceConfig(), 1), (TokenGRPOConfig(), 0.1), (TokenPPOConfig(), 0.1)],
)
def test_rewards_alone_divide_logits_by_the_temperature(
    system: Rlvr, algorithm: Any, divisor: float
) -> None:
    sampling = dataclasses.replace(system.config.sampling, temperature=0.1)
    config = dataclasses.replace(system.config, sampling=sampling)
    stage = dataclasses.replace(system, config=config).make_stage(
        "",
        algorithm,
        optimizer=system.config.optimizer,
        make_update=lambda policy: None,
        first=0,
        step_of=lambda step: step,
        weights=(1.0,),
    )
    hidden, head = np.eye(2, 8, dtype=np.float32), np.eye(3, 8, dtype=np.float32)
    found = token_scores(stage.policy.vocabulary, hidden, head, np.array([0, 0]))
    expected = jax.nn.log_softmax(hidden @ head.T / divisor)[:, 0]
    np.testing.assert_allclose(found.log_probs, expected, atol=1e-5)


def test_adapters_learn_as_they_played_and_the_base_stays(tmp_path: Path) -> None:
    config = small(model__lora__rank=4, stages=("grpo",), grpo__beta=0.1)
    with opened_run(config, tmp_path / "run") as (system, run):
        state, base = system.first_state(), jax.device_get(system.base)
        batch = system.experience(run, STOP).next(state, 0, STOP)
        after, metrics = system.update(state, batch)
        assert float(metrics["kl"]) == 0
        assert float(metrics["sampler_kl"]) < 1e-6
        # A CPU with units for matrices has factors of bfloat16, by dtype=auto.
        assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 1e-2
        leaves = jax.tree.leaves(after.params)
        assert {leaf.shape[-1] for leaf in leaves} | {leaf.shape[-2] for leaf in leaves} >= {4}
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(system.base), base)


RUBRIC = """
calls = 0

def score(question, answers, answer, parts):
    global calls
    calls += 1
    if calls % 3 == 0:
        raise RuntimeError("every third call fails")
    return 100 + parts["format"]

def fails(question, answers, answer, parts):
    return float("nan")
"""


def test_a_rubric_of_a_file_outside_the_package(tmp_path: Path) -> None:
    """What fails is masked and counted, and has no reward of 0."""
    path = tmp_path / "my_rubric.py"
    path.write_text(RUBRIC)
    config = small(rubric__path=f"{path}:score", stages=("grpo",))
    with opened_run(config, tmp_path / "run") as (system, run):
        state, experience = system.first_state(), system.experience(run, STOP)
        _, metrics = system.update(state, experience.next(state, 0, STOP))
        assert 100 <= float(metrics["return"]) <= 101
        assert experience.counts()["unscored_episodes"] == 2
    config.rubric.path = f"{path}:fails"
    with opened_run(config, tmp_path / "other") as (system, run):
        experience = system.experience(run, STOP)
        with pytest.raises(FeedbackLost, match="6 of 6"):
            experience.next(system.first_state(), 0, STOP)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stages": ("grpo", "sft")}, "config.stages"),
        ({"grpo__longest": 47}, "config.grpo.longest"),  # 3 turns of 16 tokens
        ({"sampling__room": 900}, "config.sampling.room"),
        ({"sampling__room": 20}, "config.sampling.room"),
        ({"tools__retriever": "semantic"}, "semantic"),
        ({"tools__tools": ("search",)}, "config.tools.tools"),
        ({"stages": ("grpo",), "questions__train": "./no.jsonl,x,train"}, "no.jsonl"),
        # a server that samples
        (
            {"sampling__engine": "server", "llm__url": "http://h/v1", "llm__model": "m"},
            "config.model.lora.rank",
        ),
        (
            {
                "sampling__engine": "server",
                "model__lora__rank": 4,
                "llm__server__lora_rank": 2,
            },
            "config.llm.server.lora_rank",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught, opened(small(**fields), tmp_path / "run"):
        pass
    assert named in str(caught.value)


def test_an_environment_of_verifiers_brings_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = get_config("verifiers").unlock()
    config.stages = ("sft", "grpo")
    with pytest.raises(InputError, match="stages"):
        RlvrConfig.of(config)
    for wrong in ({"arguments": "["}, {"renderer": "qwen3"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            EnvironmentConfig(**wrong)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="verifiers"):
        EnvironmentConfig().interpreter()
    made = tmp_path / ".venv-verifiers" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    assert EnvironmentConfig().interpreter() == str(made)
    assert EnvironmentConfig(python="other").interpreter() == str(tmp_path / "other")


def test_a_corpus_is_searched_by_all_questions(tmp_path: Path) -> None:
    splits: tuple[Split, ...] = ("train", "train", "dev", "dev")
    tasks = [bridge_task(bridge_question(0, each, n % 2)) for n, each in enumerate(splits)]
    source, index = tmp_path / "passages.jsonl", tmp_path / "index"
    texts = [each.text for task in tasks[:3] for each in task.documents]
    lines = [json.dumps({"id": f"p{n}", "text": text}) for n, text in enumerate(texts)]
    source.write_text("\n".join(lines))
    index_corpus(source, index, None, IndexSettings(engine="bm25"))
    fields = {"questions__bridge_train": 2, "questions__bridge_dev": 2, "stages": ("grpo",)}
    config = small(tools__corpus=str(index), train__steps=1, **fields)
    with opened_run(config, tmp_path / "run") as (system, run):
        inputs = system.inputs
        assert isinstance(inputs.library, CorpusLibrary)
        assert inputs.data["corpus"] == inputs.library.corpus.digest
        assert [len(task.gold_ids) for task in (*inputs.train, *inputs.dev)] == [2, 2, 2, 0]
        assert not any(task.documents for task in inputs.train)
        state = system.first_state()
        state, metrics = system.update(state, system.experience(run, STOP).next(state, 0, STOP))
        assert int(state.step) == 1
        assert np.isfinite(float(metrics["loss"]))


GOLD = "p4"


TASK = ToolTask("q", "Which river?", ("a stone",), gold_ids=(GOLD,))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tower, an index of words and vectors, and one of words alone."""
    folder = tmp_path_factory.mktemp("tools")
    tower = write_tower(folder / "tower")
    source = write_corpus_file(folder / "passages.jsonl", 24)
    both, words = folder / "both", folder / "words"
    encoder = PassageEncoder.of_folder(
        str(tower), dataclasses.replace(ONE_SHAPE, chunk_prefix="river ")
    )
    index_corpus(source, both, encoder, IndexSettings(engine=EXACT))
    index_corpus(source, both, None, IndexSettings(engine=BM25))
    index_corpus(source, words, None, IndexSettings(engine=BM25))
    return {"tower": str(tower), "both": str(both), "words": str(words)}


def searching(**tools: Any) -> Any:
    made = default_config()
    made.stages = ("grpo",)
    made.tools.update(**tools)
    return open_library(RlvrConfig.of(made), make_mesh((1, 1, 1), jax.devices()[:1]))


@pytest.mark.parametrize("retriever", ["bm25", "hybrid", "golden"])
def test_a_corpus_is_searched_by_the_retriever_of_the_config(
    retriever: str, folders: dict[str, str]
) -> None:
    library = searching(
        corpus=folders["both"],
        retriever=retriever,
        encoder=folders["tower"] if retriever in ("semantic", "hybrid") else "",
        passage_prefix="river ",
        question_prefix="lamp ",
    )
    assert isinstance(library, CorpusLibrary)
    (found,) = library.look([(TASK, Look("river stone", 4))])
    assert isinstance(found, tuple)
    assert len(found) == (1 if retriever == "golden" else 4)
    assert [each.id for each in found if each.is_supporting] in ([], [GOLD])


def test_every_part_of_a_task_counts_for_the_digest() -> None:
    tasks = [bridge_task(bridge_question(0, "train", index)) for index in range(2)]
    first, *others = tasks[1].documents
    changes: list[dict[str, Any]] = [
        {"answers": ("1931",)},
        {"question": "Who?"},
        {"documents": (first._replace(text=f"{first.text} It is old."), *others)},
        {"documents": (first._replace(is_supporting=not first.is_supporting), *others)},
    ]
    lists = [[tasks[0], dataclasses.replace(tasks[1], **each)] for each in changes]
    assert len({digest_of(each) for each in (tasks, tasks[:1], tasks[::-1], *lists)}) == 7
