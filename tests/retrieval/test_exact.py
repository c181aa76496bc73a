"""The exact search against NumPy in float64, on one and on eight devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import exact, search_plan
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex, ExactSettings
from qrag_jax.retrieval.protocol import NONE, Queries
from tests.devices import mesh_of
from tests.retrieval.conformance import (
    OF_VECTORS,
    Engine,
    assert_same,
    corpus_of,
    run_with,
    searched,
    task_of,
)
from tests.retrieval.saved_vectors import save_exact, save_vectors


def engine_of(*devices: int, storage: str = "float32") -> Engine:
    settings = ExactSettings(storage)

    def make(corpus, vectors) -> ExactIndex:
        return ExactIndex(corpus, vectors, mesh_of(*devices), settings)

    def opened(folder: Path, corpus: StoredCorpus) -> ExactIndex:
        return ExactIndex.open(folder, corpus, mesh_of(*devices))

    return Engine(make, opened, save_exact)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and spans although corpora are small; none divides them."""
    monkeypatch.setattr(search_plan, "_CPU_BLOCK", 48)
    monkeypatch.setattr(search_plan, "_CPU_SPAN", 150)
    monkeypatch.setattr(search_plan, "_CPU_GATHERED", 2**12)


test_on_one_device = run_with(engine_of(1, 1, 1), OF_VECTORS)
test_on_eight_devices = run_with(engine_of(2, 2, 2), OF_VECTORS)
# Scores of whole numbers are the same in all storages, for they are scored again.
test_int8 = run_with(engine_of(1, 2, 1, storage="int8"), OF_VECTORS)
test_bfloat16 = run_with(engine_of(1, 1, 1, storage="bfloat16"), OF_VECTORS)


@pytest.mark.parametrize("devices", [(1, 1, 1), (2, 2, 2)])
def test_as_accelerators_search(
    devices: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks written out one after the other, products of bfloat16 factors."""
    monkeypatch.setattr(exact.Platform, "on_cpu", False)
    monkeypatch.setattr(search_plan, "_SCORES", 2**9)
    monkeypatch.setattr(search_plan, "_BLOCKS", 9)
    monkeypatch.setattr(search_plan, "_MAXIMA", 2**8)
    monkeypatch.setattr(search_plan, "_ALIGNED", 32)
    task = task_of(tmp_path, 3001)
    layouts = []
    for storage in ("float32", "bfloat16", "int8"):
        index = ExactIndex(task.corpus, task.vectors, mesh_of(*devices), ExactSettings(storage, 3))
        plan = search_plan.plan_of(index._layout, search_plan.Wanted(16, 20, 60), False)
        assert plan.unrolled
        assert plan.half == (storage != "float32")
        assert -(-index._layout.rows // plan.block) > 3
        layouts.append(index._layout.bytes)
        for where in (None, {"kind": [1, 2]}):
            assert_same(index.search(task.queries, 20, where), searched(task, 20, where))
    assert layouts == sorted(layouts, reverse=True)


def test_int8_finds_nearly_all_of_random_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corpus = corpus_of(tmp_path, 2000)
    vectors = rng.standard_normal((2000, 32)).astype(np.float32)
    queries = Queries([""] * 20, rng.standard_normal((20, 32)).astype(np.float32))
    wanted = ExactIndex(corpus, vectors).search(queries, 10)
    for storage in ("int8", "bfloat16"):
        found = ExactIndex(corpus, vectors, None, ExactSettings(storage)).search(queries, 10)
        assert (found.numbers == wanted.numbers).mean() > 0.98
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4)
    one = ExactIndex(corpus, vectors, None, ExactSettings("int8", 1)).search(queries, 10)
    assert (one.numbers != wanted.numbers).any()  # so candidates are what makes the difference


def test_files_of_bfloat16(tmp_path: Path) -> None:
    task = task_of(tmp_path, 83)
    half = task.vectors.astype(exact.jnp.bfloat16)
    manifest = save_vectors(tmp_path, task.corpus, half, storage="bfloat16", candidates=0.0)
    assert sum(manifest.files.values()) == half.nbytes
    index = ExactIndex.open(tmp_path, task.corpus, mesh_of())
    assert index.settings.storage == "bfloat16"
    assert_same(index.search(task.queries, 20), searched(task, 20))
    np.testing.assert_array_equal(index.vectors([3, 1]), task.vectors[[3, 1]])


def test_batches_are_a_few_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_plan, "_CPU_BATCH", 16)
    task = task_of(tmp_path, 83, queries=50)
    index = ExactIndex(task.corpus, task.vectors, mesh_of())
    assert_same(index.search(task.queries, 10), searched(task, 10))
    exact.make_search.cache_clear()
    for count in range(1, 51):
        some = Queries(task.queries.texts[:count], task.queries.vectors[:count])
        index.search(some, 10)
    assert exact.make_search.cache_info().currsize <= 3
    with jax.log_compiles(False), jax.checking_leaks():
        assert index.search(task.queries, 10).numbers.shape == (50, 10)


def test_scores_never_exist_whole(tmp_path: Path) -> None:
    task = task_of(tmp_path, 3000, queries=32)
    index = ExactIndex(task.corpus, task.vectors, mesh_of())
    plan = search_plan.plan_of(index._layout, search_plan.Wanted(32, 5, 5), True)
    search = partial(exact.make_search(mesh_of(), plan, False))
    text = str(jax.make_jaxpr(search)(task.queries.vectors, index._part))
    assert f"f32[32,{plan.block}]" in text
    assert f"f32[32,{index._layout.rows}]" not in text
    assert "f32[32,3000]" not in text


def test_an_index_is_of_its_encoder(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    save_vectors(tmp_path, task.corpus, task.vectors, "e0")
    assert ExactIndex.open(tmp_path, task.corpus, mesh_of(), encoder="e0").encoder == "e0"
    with pytest.raises(InputError, match="field encoder"):
        ExactIndex.open(tmp_path, task.corpus, mesh_of(), encoder="e1")


def test_another_count_is_refused(tmp_path: Path) -> None:
    task = task_of(tmp_path, 40)
    save_vectors(tmp_path, task.corpus, task.vectors[:39])
    with pytest.raises(InputError, match="field count"):
        ExactIndex.open(tmp_path, task.corpus, mesh_of())


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match=r"retrieval.storage"):
        ExactSettings("int4")
    for wrong in (-1, 0.5):
        with pytest.raises(InputError, match=rf"retrieval.candidates is {wrong}"):
            ExactSettings(candidates=wrong)
    assert ExactSettings("int8").candidates_of(10) == 40
    assert ExactSettings("int8", 1.5).candidates_of(5) == 8
    assert ExactSettings().candidates_of(7) == 7


def test_devices_without_a_passage(tmp_path: Path) -> None:
    task = task_of(tmp_path, 3)
    index = ExactIndex(task.corpus, task.vectors, mesh_of(8))
    found = index.search(task.queries, 5)
    assert_same(found, searched(task, 5))
    assert (found.numbers[:, 3:] == NONE).all()
