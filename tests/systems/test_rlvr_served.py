"""RLVR whose episodes a server samples: versions, staleness, the check, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.rollouts.served_policy import Versioned
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems.rlvr import Rlvr
from qrag_jax.systems.rlvr_config import RlvrConfig
from tests.rollouts.token_setup import PolicyServer, write_calling_model
from tests.systems.small_runs import opened_run as opened
from tests.systems.small_runs import small_rlvr as small

STEPS, BATCH = 4, 2


RANK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("calling") / "model")


def settings(folder: Path, url: str = "", **fields: Any) -> Any:
    given: dict[str, Any] = {
        "model__path": str(folder),
        "model__lora__rank": RANK,
        "stages": ("grpo",),
        "sampling__engine": "server",
        "sampling__temperature": 0.7,
        "llm__url": url,
        "llm__model": "tiny" if url else "",
        "train__steps": STEPS,
        "train__batch_size": BATCH,
        "optimizer__learning_rate": 1e-2,
        # A CPU with units for matrices would have factors of bfloat16, and larger differences.
        "model__dtype": "float32",
    }
    return small(**{**given, **fields})


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[PolicyServer]:
    sampling = RlvrConfig.of(settings(folder, "http://127.0.0.1:1")).sampling
    with PolicyServer.started(folder, sampling) as server:
        yield server


@pytest.fixture
def server(running: PolicyServer) -> PolicyServer:
    """It, as if it had just been started."""
    running.begin()
    return running


def trained(system: Rlvr, run: Run, until: int = STEPS) -> Any:
    """Learns as `train` does; the parameters that come of it."""
    stop, state = StopSignal(), system.first_state()
    experience = system.experience(run, stop)
    for step in range(until):
        state, metrics = system.update(state, experience.next(state, step, stop))
        if not system.config.tools.staleness:  # strictly on-policy
            assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 1e-2
    counts = experience.counts()
    assert counts["llm/failures"] == 0
    assert 0 < counts["llm/handover_seconds"] < 60
    return jax.device_get(state.params)


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_batch_is_of_one_version(
    staleness: int, server: PolicyServer, folder: Path, tmp_path: Path
) -> None:
    config = settings(folder, server.url, tools__staleness=staleness)
    with opened(config, tmp_path / "run") as (system, run):
        found = trained(system, run)
        first = leaves(system.inputs.model.trained)
    assert max(np.abs(a - b).max() for a, b in zip(first, leaves(found), strict=True)) > 1e-3
    published = [
        name.partition("@")[2].split(".")[0] for name in (*server.unloaded, *server.loaded)
    ]
    assert published == ["check", *map(str, range(STEPS - staleness))]
    assert len(server.loaded) == min(staleness + 2, STEPS - staleness + 1)
    asked = [body["model"] for body in server.asked]
    assert len({*asked}) == len(published)
    if not staleness:  # one after the other
        assert asked == sorted(asked, key=[*dict.fromkeys(asked)].index)


def test_the_server_draws_what_the_device_would(
    server: PolicyServer, folder: Path, tmp_path: Path
) -> None:
    """Greedy turns of the server and of the device are the same, token by token."""
    with opened(settings(folder, server.url), tmp_path / "run") as (system, run):
        after = trained(system, run, 2)
        greedy = dataclasses.replace(system.config.sampling, temperature=0.0)
        assert system.served is not None
        system.served._settings = system.served._settings._replace(sampling=greedy)
        starts = system.starts(system.inputs.train[:8], 2, 0)
        stop = StopSignal()
        ours = system.play(after, starts, stop, greedy=True)
        theirs = system.play(Versioned(after, 2), starts, stop)
    for one, other in zip(ours, theirs, strict=True):
        assert one.status == other.status
        turns = [[turn for segment in each.segments for turn in segment] for each in (one, other)]
        for mine, its in zip(*turns, strict=True):
            np.testing.assert_array_equal(mine.sampled, its.sampled)
            np.testing.assert_allclose(mine.log_probs, its.log_probs, atol=1e-4)


def without_ids(request: dict[str, Any], choice: dict[str, Any]) -> None:
    del choice["token_ids"]


def as_raw(server: PolicyServer) -> None:
    server.is_raw = True


def with_other_tokens(server: PolicyServer) -> None:
    other = shutil.copytree(server.folder, server.folder.parent / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("\\\\p{Lu}", "\\\\p{Ll}"))
    from transformers import AutoTokenizer

    server.tokenizer = AutoTokenizer.from_pretrained(other)
    shutil.rmtree(other)


def deaf_to_adapters(server: PolicyServer) -> None:
    for name in [*server.loaded]:
        server.loaded[name] = server._base


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: setattr(s, "change", without_ids), "token ids"),
        (as_raw, "processed_logprobs"),
        (with_other_tokens, "tokenizer"),
        (
            lambda s: setattr(s, "before", lambda: deaf_to_adapters(s)),
            "adapters",
        ),
    ],
)
def test_servers_that_cannot_train(
    spoil: Callable[[PolicyServer], None],
    said: str,
    server: PolicyServer,
    folder: Path,
    tmp_path: Path,
) -> None:
    spoil(server)
    with (
        opened(settings(folder, server.url), tmp_path / "run") as (system, run),
        pytest.raises(InputError, match=said),
    ):
        system.experience(run, StopSignal())
