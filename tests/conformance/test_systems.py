"""What is true of every system: one small training of it, resumed, spread, scored, exported.

A new system is tested by its line in `small_runs.SMALL`, and in `SCORED`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.export import export_language_model
from qrag_jax.models.first_language_model import load_language_model
from qrag_jax.runtime.config_fields import CONFIG_NAME, flat, read_fields, save_config
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems import run_flags, training
from qrag_jax.systems.scoring import ScoreOptions, score_run
from tests.entry_points import Commands, assert_same_run, metric_lines, refusal
from tests.systems.small_runs import BANDIT, SMALL, opened_run

# A first stage of four steps, or of as many as there are; two of the next one.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "q_rag": {"runtime__mesh": (1, 8, 1)},  # one of each update: parts of the parameters, too
    "harr": {"train__steps": 6, "train__log_every": 1, "train__eval_every": 6},
    "rlvr": {
        **{"sft__steps": 4, "train__eval_every": 6, "train__checkpoint_every": 2},
        "runtime__mesh": (1, 8, 1),
    },
    "leret": {
        "script__steps": 4,
        "script__learning_rate": 1e-2,
        "iterations": 1,
        "sft__steps": 1,
        "preference__steps": 1,
        "train__checkpoint_every": 2,
        "tries__samples": 6,
    },
    "deepretrieval": {"script__steps": 4, "train__checkpoint_every": 2},
}
STEPS, BEFORE = 6, 4  # the last step, and that of the checkpoint before it
FLOAT32 = {"model__dtype": "float32"}  # as on any machine; "auto" may be bfloat16
STOP = StopSignal()

# The loss is of ratios that are 1, whatever was learned: of these, the weights move, at least.
RATIOS = ("harr", BANDIT)
LANGUAGE_MODELS = ("rlvr", "leret", "deepretrieval")


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run."""

    name: str
    workdir: Path

    def config(self, **fields: Any) -> ConfigDict:
        return config_of(self.name, **fields)

    def copy(self, folder: Path, *, whole: bool = False) -> Path:
        """A copy; without checkpoints, so that a start begins at step 0, unless it is whole."""
        left_out = () if whole else ("checkpoints", "metrics.jsonl", "training.json")
        ignored = shutil.ignore_patterns(*left_out)
        return Path(shutil.copytree(self.workdir, folder, ignore=ignored))


def config_of(name: str, **fields: Any) -> ConfigDict:
    exact = FLOAT32 if name in LANGUAGE_MODELS else {}
    return SMALL[name](**{**exact, **FIELDS.get(name, {}), **fields})


@pytest.fixture(scope="module", params=[*sorted(systems.SYSTEMS), BANDIT])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    """A run of `STEPS` steps on eight devices."""
    name = request.param
    workdir = tmp_path_factory.mktemp(Path(name).stem) / "run"
    assert training.train(config_of(name), workdir) == 0
    yield Trained(name, workdir)
    if name == BANDIT:
        del systems.SYSTEMS[BANDIT]


@pytest.fixture(scope="module")
def opened(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Its system and the run, at step 0."""
    workdir = trained.copy(tmp_path_factory.mktemp("opened") / "again")
    with opened_run(trained.config(), workdir) as both:
        yield both


def host(tree: Any) -> list[np.ndarray]:
    plain = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x) for x in plain
    ]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


# ---------------------------------------------------------------- training


def test_every_system_has_a_small_run() -> None:
    assert SMALL.keys() >= systems.SYSTEMS.keys()


def test_a_training_leaves_what_others_read(trained: Trained) -> None:
    assert (trained.workdir / "training.json").exists()
    assert read_fields(trained.workdir / CONFIG_NAME)["system"] == trained.name
    lines = metric_lines(trained.workdir)
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert [*losses] == [*range(1, STEPS + 1)]
    assert all(map(math.isfinite, losses.values()))
    scored = [line["step"] for line in lines if any(name.startswith("eval/") for name in line)]
    assert scored == [0, STEPS]


def test_resumed_is_uninterrupted_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    """From what a crash behind the checkpoint of step `BEFORE` leaves."""
    workdir = trained.copy(tmp_path / "run", whole=True)
    shutil.rmtree(workdir / "checkpoints" / "last" / str(STEPS))
    (workdir / "training.json").unlink()
    lines = [json.dumps(line) for line in metric_lines(workdir) if line["step"] <= BEFORE]
    (workdir / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "train/lo']))
    assert training.train(trained.config(), workdir) == 0
    assert_same_run(workdir, trained.workdir, STEPS)


def test_another_config_does_not_go_on(trained: Trained, tmp_path: Path) -> None:
    workdir = trained.copy(tmp_path / "run", whole=True)
    name = "rate" if trained.name == BANDIT else "optimizer.learning_rate"
    with pytest.raises(InputError, match=re.escape(f"config.{name}")):
        training.train(trained.config(**{name.replace(".", "__"): 0.5}), workdir)


def test_play_is_deterministic_and_depends_on_its_place(opened: Any) -> None:
    system, run = opened
    state = system.first_state()
    one, other = (system.experience(run, STOP) for _ in range(2))
    first = host(one.next(state, 0, STOP))
    assert equal(first, host(other.next(state, 0, STOP)))
    assert not equal(first, host(one.next(state, 1, STOP)))


def test_learning_lowers_the_loss_on_a_fixed_batch(opened: Any, trained: Trained) -> None:
    system, run = opened
    state = system.first_state()
    batch = system.experience(run, STOP).next(state, 0, STOP)
    losses, before = [], [leaf.copy() for leaf in host(state.params)]  # updates overwrite them
    for _ in range(4):  # of the first stage
        state, metrics = system.update(state, batch)
        assert float(metrics["skipped"]) == 0
        losses.append(float(metrics["loss"]))
    assert math.isfinite(losses[-1])
    assert not equal(before, host(state.params))
    if trained.name not in RATIOS:
        assert losses[-1] < losses[0]


def test_eight_devices_learn_what_one_does(trained: Trained, tmp_path: Path) -> None:
    """The training had parts of its batch, or of its parameters, on eight devices."""
    if trained.name == BANDIT:
        pytest.skip("the example computes on one device")
    config, workdir = trained.config(runtime__mesh=(1, 1, 1)), trained.copy(tmp_path / "run")
    with opened_run(config, workdir, devices=jax.devices()[:1]) as (system, run):
        state = system.first_state()
        _, metrics = system.update(state, system.experience(run, STOP).next(state, 0, STOP))
    first = next(line for line in metric_lines(trained.workdir) if "train/loss" in line)
    assert first["step"] == 1
    for name in ("loss", "grad_norm"):
        expected = pytest.approx(first[f"train/{name}"], rel=2e-3, abs=2e-5)
        assert float(metrics[name]) == expected, name


def test_a_dry_run_knows_every_program(opened: Any, trained: Trained) -> None:
    """Their shapes agree, without computing them; an update gives a state as it was."""
    if trained.name == BANDIT:
        pytest.skip("the example names no programs")
    system, _ = opened
    programs = system.programs()
    assert programs
    for program in programs:
        found = jax.eval_shape(program.function, *program.arguments)
        assert program.flops > 0
        if program.name.startswith("update"):
            state, metrics = found
            assert {"loss", "skipped"} <= metrics.keys()
            shapes = [
                [leaf.shape for leaf in jax.tree.leaves(s)] for s in (state, program.arguments[0])
            ]
            assert shapes[0] == shapes[1]


# ---------------------------------------------------------------- what is done with a run


def test_a_summary_names_what_was_scored(trained: Trained, tmp_path: Path) -> None:
    workdir, out = trained.copy(tmp_path / "run", whole=True), tmp_path / "out"
    before = sorted(path.relative_to(workdir) for path in workdir.rglob("*"))
    score_run(workdir, trained.config(), ScoreOptions("last", out=out))
    (path, *_) = out.rglob("*summary.json")
    named = ("last", str(STEPS), *(() if trained.name == BANDIT else ("untrained",)))
    assert all(name in path.read_text() for name in named)
    assert sorted(path.relative_to(workdir) for path in workdir.rglob("*")) == before
    logs = {log: log.read_bytes() for log in out.rglob("*.jsonl")}
    assert logs or trained.name == BANDIT  # which writes none
    # The same command again scores nothing.
    score_run(workdir, trained.config(), ScoreOptions("last", out=out))
    assert {log: log.read_bytes() for log in out.rglob("*.jsonl")} == logs


@pytest.fixture
def exported(trained: Trained, tmp_path: Path) -> Path:
    workdir, out = trained.copy(tmp_path / "run", whole=True), tmp_path / "out"
    if trained.name == BANDIT:
        pytest.skip("tests/systems/test_systems.py exports it")
    kind = systems.kind(trained.config())
    if trained.name in LANGUAGE_MODELS:
        export_language_model(kind, workdir, trained.config(), "last", out)
    elif "export" in kind.SETTINGS.COMMANDS:
        kind.export_run(workdir, trained.config(), "last", out)
    else:
        pytest.skip("the system has no export")
    return out


def test_an_export_is_what_was_trained(trained: Trained, exported: Path, tmp_path: Path) -> None:
    card = (exported / "README.md").read_text()
    assert str(tmp_path) not in card  # no folder of the training machine
    if trained.name not in LANGUAGE_MODELS:  # towers: tests/systems/test_retriever.py
        return
    workdir = trained.copy(tmp_path / "other", whole=True)
    with systems.saved_system(workdir, trained.config(), "last") as (_, state, step):
        assert step == STEPS
        ours = jax.device_get(state.params)
    theirs = load_language_model(exported).params
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# ---------------------------------------------------------------- a folder from elsewhere


def test_a_folder_from_elsewhere_runs_no_code(
    trained: Trained, commands: Commands, tmp_path: Path
) -> None:
    """Neither by a field that names a file nor by the system's name."""
    workdir, mark = trained.copy(tmp_path / "run", whole=True), tmp_path / "was run"
    theirs = workdir / "theirs.py"
    theirs.write_text(f"open({str(mark)!r}, 'w')\nrun = print\n")
    fields = ConfigDict(read_fields(workdir / CONFIG_NAME))
    known = flat(fields.to_dict())
    named = [n for n in (*run_flags.CODE_FIELDS, *run_flags.PROGRAM_FIELDS) if n in known]
    for name in [*named, "system"]:
        changed = fields.copy_and_resolve_references()
        value = "theirs" if name == "system" else f"{theirs}:run"
        changed.update_from_flattened_dict({name: value})
        save_config(changed, workdir / CONFIG_NAME)
        data = fields.data.path if "data" in fields else ""  # code of these tests, maybe
        trusted = [f"--config.data.path={data}"] if ".py:" in data and name != "data.path" else []
        words = (f"--workdir={workdir}", "--checkpoint=last", *trusted)
        said = refusal(commands.run("evaluate", *words))
        assert (value if name == "system" else name) in said
    assert not mark.exists()
