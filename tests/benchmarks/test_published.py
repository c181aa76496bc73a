"""Published runs: our configs hold their constants, and encoders are of their real size."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from benchmarks import published as suite
from benchmarks import published_constants
from configs import published
from qrag_jax.models.pretrained import FAMILIES
from qrag_jax.systems.q_rag_config import QRagConfig

every_run = pytest.mark.parametrize("run", published.RUNS)


def known(run: str) -> bool:
    """Whether there is an encoder of the run's kind."""
    path = published.get_config(run).encoder.path
    return suite.MODELS[path]["model_type"] in FAMILIES


def test_every_run_has_constants() -> None:
    names = [name.removeprefix("published:") for name in published_constants.RUNS]
    assert {*published.RUNS} <= {*names}
    assert {published.get_config(run).encoder.path for run in published.RUNS} == {*suite.MODELS}


@pytest.mark.parametrize("run", published_constants.RUNS)
def test_constants_are_the_published_ones(run: str) -> None:
    pairs = suite.compared(run)
    assert len({constant.name for constant, _ in pairs}) == len(pairs)
    for constant, ours in pairs:
        assert ours == constant.expected, constant.name
        assert (ours == constant.theirs) == (not constant.why), constant.name


def test_a_constant_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = published_constants.RUNS["published:e5-hotpotqa"]
    changed = tuple(
        dataclasses.replace(c, theirs=0.9) if c.name == "pqn.gamma" else c for c in wrong
    )
    monkeypatch.setitem(published_constants.RUNS, "published:e5-hotpotqa", changed)
    monkeypatch.setattr(suite, "build", lambda config, quick: suite.Built())
    case = suite._case("published:e5-hotpotqa", True)
    assert case.holds is False
    assert case.details["differs: pqn.gamma, theirs 0.9, ours 0.99"] == "unexplained"


@every_run
def test_an_encoder_of_the_real_size_takes_the_rows(run: str) -> None:
    if not known(run):
        pytest.skip("there is no encoder of this kind yet")
    config = QRagConfig.of(published.get_config(run))
    encoder = suite.encoder_of(config, suite.MODELS[config.encoder.path])
    tower = jax.eval_shape(encoder.init, jax.random.key(0))
    millions = sum(leaf.size for leaf in jax.tree.leaves(tower)) / 1e6
    expected = {"facebook/contriever": 109, "intfloat/multilingual-e5-large": 559}
    expected |= {"Qwen/Qwen3-Embedding-0.6B": 596, "Alibaba-NLP/gte-multilingual-base": 305}
    assert round(millions) == expected[config.encoder.path]


def test_a_training_step_is_built() -> None:
    """With rewards of a model: those of the facts are built by the suite."""
    given = published.get_config("contriever-babilong-em")
    given.train.batch_size = 4
    config = QRagConfig.of(given)
    model = suite.MODELS[config.encoder.path] | {"num_hidden_layers": 1}
    encoder = suite.encoder_of(config, model)
    suite._trace_step(config, encoder, jax.eval_shape(encoder.init, jax.random.key(0)))
    assert not config.is_ground_truth
