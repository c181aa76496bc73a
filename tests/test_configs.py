"""The experiment files: every variant builds, every tiny one trains and evaluates offline."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from qrag_jax import experiment
from tests.entry_points import ROOT, Commands, metric_lines, refusal

NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "common")

# Variants that are other ones' shorter names.
SHORT = {"babilong": {"": "qa1", "tiny": "qa1-tiny", "minilm": "qa1-minilm"}}


def module(name: str) -> ModuleType:
    return importlib.import_module(f"configs.{name}")


def variants(name: str) -> list[str]:
    """The variants that a config names when it is asked for one it does not have."""
    with pytest.raises(ValueError, match="the variant 'none-such' is unknown") as caught:
        module(name).get_config("none-such")
    return ["", *re.findall(r":([\w-]+)", str(caught.value).partition("use ")[2])]


def test_there_are_experiments() -> None:
    documents = {"babilong", "niah"}
    questions = {"hotpotqa", "musique", "two_wiki", "hotpotqa_musique", "quickstart"}
    assert set(NAMES) >= questions | documents


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_builds(name: str) -> None:
    assert "tiny" in variants(name)
    for variant in variants(name):
        config = module(name).get_config(variant)
        experiment.check_values(config)
        assert config.is_locked
        assert config.data.sources
    # Different variants are different experiments.
    built = {variant: module(name).get_config(variant).to_json() for variant in variants(name)}
    for short, long in SHORT.get(name, {}).items():
        assert built.pop(short) == built[long]
    assert len(set(built.values())) == len(built)


def test_every_task_of_babilong_has_every_size() -> None:
    known = variants("babilong")
    assert len(known) == 3 + 20 * 3
    for number in range(1, 21):
        for size in ("", "-tiny", "-minilm"):
            config = module("babilong").get_config(f"qa{number}{size}")
            assert config.data.babilong.task == f"qa{number}"
            assert config.encoder.path == {"": "facebook/contriever", "-tiny": ""}.get(
                size, "minilm"
            )
    for wrong in ("qa0", "qa21", "qa3-", "qa3-huge", "-tiny", "tiny-qa3"):
        with pytest.raises(ValueError, match=f"the variant '{wrong}' is unknown"):
            module("babilong").get_config(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_docstring_holds_the_command(name: str) -> None:
    text = module(name).__doc__ or ""
    assert f"python -m qrag_jax.train --config=configs/{name}.py" in text
    assert ":tiny" in text


# `hotpotqa:tiny` is the run that test_train and test_evaluate share.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "hotpotqa"])
def test_tiny_trains_and_evaluates_offline(name: str, commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    commands.succeed(
        "train",
        f"--config=configs/{name}.py:tiny",
        f"--workdir={workdir}",
        "--config.train.steps=2",
        "--config.encoder.length_buckets=1",
        "--config.data.synthetic.train=24",
        "--config.data.synthetic.dev=10",
    )
    assert [line["step"] for line in metric_lines(workdir) if "train/loss" in line] == [2]
    commands.succeed("evaluate", f"--workdir={workdir}", "--samples=8")
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["samples"] == 8
    assert 0 <= summary["trained"]["fact_f1"] <= 1


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--config.trian.steps=1", "--config.trian.steps: the config has no field 'trian'"),
        ("--config.train.stpes=1", "--config.train.stpes: the config has no field 'stpes'"),
        ("--config.train.steps=abc", "--config.train.steps=abc"),
        ("--config=configs/hotpotqa.py:huge", "the variant 'huge' is unknown; use :tiny"),
        ("--config=configs/no_such.py", "configs/no_such.py"),
        ("--confg=configs/hotpotqa.py", "confg"),
        ("steps=3", "unexpected argument 'steps=3'"),
    ],
)
def test_wrong_command_line(argument: str, says: str, commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    config = "--config=configs/hotpotqa.py:tiny"
    given = [argument] if argument.startswith("--config=") else [config, argument]
    assert says in refusal(commands.run("train", f"--workdir={workdir}", *given))
    assert not workdir.exists()
