"""The experiment files: every variant builds, every tiny one trains and evaluates offline."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import ModuleType

import jax
import pytest

from configs import common
from qrag_jax import systems
from qrag_jax.runtime.run import Run
from qrag_jax.systems.leret_config import LeretConfig
from qrag_jax.systems.q_rag_config import QRagConfig, load_config
from qrag_jax.systems.rlvr_config import RlvrConfig
from tests.entry_points import ROOT, Commands, metric_lines, refusal
from tests.models.conftest import (
    torch_bert,
    torch_gte,
    torch_qwen3,
    torch_xlm_roberta,
    write_bpe_tokenizer,
    write_tokenizer,
    write_unigram_tokenizer,
)
from tests.systems.parts import prepared

EVERY = sorted(
    path.stem for path in (ROOT / "configs").glob("*.py") if not path.stem.startswith("common")
)
OTHERS = ("harr", "rlvr", "leret", "deepretrieval")
NAMES = [name for name in EVERY if not name.startswith(OTHERS)]  # of Q-RAG

# Variants that are other ones' shorter names.
SHORT = {
    "babilong": {"": "qa1", "tiny": "qa1-tiny", "minilm": "qa1-minilm"},
    "published": {"": "e5-hotpotqa"},
}


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
        QRagConfig.of(config)
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
            assert config.data.sources.babilong.task == f"qa{number}"
            assert config.encoder.path == {"": "facebook/contriever", "-tiny": ""}.get(
                size, "minilm"
            )
    for wrong in ("qa0", "qa21", "qa3-", "qa3-huge", "-tiny", "tiny-qa3"):
        with pytest.raises(ValueError, match=f"the variant '{wrong}' is unknown"):
            module("babilong").get_config(wrong)


AGENT_VARIANTS = (
    ("synthetic", "react", "tiny"),
    ("two_wiki", "planner", "minilm"),
    ("hotpotqa", "react", "0.6b"),
    ("musique", "search_r1", "4b"),
)


@pytest.mark.parametrize("name", ["harr_grpo", "harr_ppo"])
def test_variants_of_agents(name: str) -> None:
    known = [variant for variant in variants(name) if variant]
    assert known == ["tiny", "minilm", "DATA-AGENT-SIZE"]
    agents = [f"{data}-{agent}-{size}" for data, agent, size in AGENT_VARIANTS]
    for variant in (*known[:2], *agents):
        config = module(name).get_config(variant)
        if not config.llm.server.model:
            config.llm.update(url="http://127.0.0.1:8000/v1", model="a-model")
        systems.check(config)
        assert config.is_locked
        assert config.algorithm == name.removeprefix("harr_")
    for wrong in ("hotpotqa-react", "hotpotqa-react-1b", "nq-react-4b", "-tiny"):
        with pytest.raises(ValueError, match=f"the variant '{wrong}' is unknown"):
            module(name).get_config(wrong)


@pytest.mark.parametrize("name", EVERY)
def test_docstring_holds_the_command(name: str) -> None:
    text = module(name).__doc__ or ""
    assert f"python -m qrag_jax.train --config=configs/{name}.py" in text
    assert ":tiny" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_tiny_experiment_fits_its_programs(name: str, tmp_path: Path) -> None:
    """Data, encoder and the shapes of all that is computed, without computing it."""
    config = module(name).get_config("tiny")
    config.data.cache = str(tmp_path / "cache")
    systems.check(config)
    with (
        Run.open(tmp_path / "run", 0.0) as run,
        systems.open_system(config, run, dry=True) as system,
    ):
        found = {p.name: jax.eval_shape(p.function, *p.arguments) for p in system.programs()}
    state, metrics = found["update"]
    assert {"loss", "skipped", "return", "fact_em"} <= metrics.keys()
    assert jax.tree.leaves(state.params)[0].shape[0] == 2  # the two towers
    steps = found["evaluation"].multi_step.taken.shape
    assert steps == (config.eval.batch_size, config.env.max_steps)


# `hotpotqa:tiny` is the run that test_train and test_evaluate share. Documents that are drawn anew
# and, in tests/data, the reader of every source are tried by default.
QUICK = ("babilong",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in NAMES
        if name != "hotpotqa"
    ],
)
def test_tiny_trains_and_evaluates_offline(name: str, commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    made = f"data.sources.{name}" if name in ("babilong", "niah") else "data.synthetic"
    commands.succeed(
        "train",
        f"--config=configs/{name}.py:tiny",
        f"--workdir={workdir}",
        "--config.train.steps=2",
        "--config.encoder.length_buckets=1",
        "--config.encoder.block_sizes=1",
        f"--config.{made}.train=24",
        f"--config.{made}.dev=10",
    )
    assert [line["step"] for line in metric_lines(workdir) if "train/loss" in line] == [2]
    commands.succeed("evaluate", f"--workdir={workdir}", "--samples=8")
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["samples"] == 8
    assert 0 <= summary["trained"]["fact_f1"] <= 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random folders of the families, by the names of the variants."""
    folder = tmp_path_factory.mktemp("models")
    small = {"num_hidden_layers": 1, "max_position_embeddings": 256}
    torch_bert(**small).save_pretrained(folder / "contriever")
    write_tokenizer(folder / "contriever")
    torch_xlm_roberta(**small).save_pretrained(folder / "e5")
    write_unigram_tokenizer(folder / "e5")
    torch_gte(**small).save_pretrained(folder / "gte")
    write_unigram_tokenizer(folder / "gte")
    torch_qwen3(vocab_size=264, **small).model.save_pretrained(folder / "qwen3")
    write_bpe_tokenizer(folder / "qwen3")
    return folder


def short(models: Path, variant: str) -> list[str]:
    """A run of two steps with a tiny folder of the variant's family."""
    fields = {
        "encoder.path": models / variant,
        "encoder.dtype": "float32",
        "encoder.length_buckets": 1,
        "encoder.block_sizes": 1,
        "data.path": "synthetic",
        "data.synthetic.hops": "(2,)",
        "data.synthetic.train": 16,
        "data.synthetic.dev": 4,
        "data.max_question_tokens": 24,
        "data.max_chunk_tokens": 32,
        "data.max_chunk_tokens_in_state": 16,
        "optimizer.warmup_steps": 1,
        "train.steps": 2,
        "train.batch_size": 4,
        "train.log_every": 1,
        "train.eval_every": 2,
        "train.checkpoint_every": 2,
        "eval.samples": 4,
        "eval.batch_size": 4,
    }
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    return [f"--config=configs/hotpotqa.py:{variant}", *given]


# By default the family with adapters.
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow)
        for name in common.ENCODERS
    ],
)
def test_every_encoder_trains(
    variant: str, models: Path, commands: Commands, tmp_path: Path
) -> None:
    commands.succeed("train", *short(models, variant), f"--workdir={tmp_path}")
    steps = {line["step"]: line for line in metric_lines(tmp_path) if "train/loss" in line}
    assert [*steps] == [1, 2]
    assert all(math.isfinite(line["train/loss"]) for line in steps.values())
    config = json.loads((tmp_path / "config.json").read_text())["encoder"]
    loaded = prepared(load_config(tmp_path / "config.json"), tmp_path)
    encoder = loaded.encoder
    assert (config["pooling"], config["normalise"], config["scale"]) == {
        "contriever": ("mean", False, 0.1),
        "e5": ("mean", True, 1.0),
        "gte": ("cls", True, 1.0),
        "qwen3": ("last", True, 1.0),
    }[variant]
    assert (encoder.pooling, encoder.normalise, encoder.scale) == (
        config["pooling"],
        config["normalise"],
        config["scale"],
    )
    assert (
        loaded.model_config["model_type"]
        == {
            "contriever": "bert",
            "e5": "xlm-roberta",
            "gte": "new",
            "qwen3": "qwen3",
        }[variant]
    )
    assert (loaded.lora is not None) == (variant == "qwen3")
    decode = loaded.tokenizer.backend.decode
    if variant == "e5":
        prefixes = [decode(list(ids)) for ids in (encoder.state_prefix, encoder.chunk_prefix)]
        assert [prefix.strip() for prefix in prefixes] == ["query:", "passage:"]
    if variant == "qwen3":
        assert decode(list(encoder.state_prefix)).startswith("Instruct: Given a question")
        assert decode(list(encoder.state_prefix)).endswith("\nQuery:")
        assert encoder.chunk_prefix == ()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--config.trian.steps=1", "--config.trian.steps: the config has no field 'trian'"),
        (
            "--config.train.stpes=1",
            "--config.train.stpes: the config has no field 'stpes'; "
            "did you mean --config.train.steps?",
        ),
        ("--config.train.steps=abc", "--config.train.steps is 'abc'; give a whole number."),
        ("--config=configs/hotpotqa.py:huge", "the variant 'huge' is unknown; use :tiny"),
        ("--config=configs/no_such.py", "configs/no_such.py is not there; use one of configs/"),
        ("--config=configs/hotpotq.py", "did you mean configs/hotpotqa.py?"),
        ("--confg=configs/hotpotqa.py", "there is no flag --confg; did you mean --config?"),
        ("steps=3", "unexpected argument 'steps=3'"),
        ("--config.data.niah.noise=B", "niah"),
    ],
)
def test_wrong_command_line(argument: str, says: str, commands: Commands, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    config = "--config=configs/hotpotqa.py:tiny"
    given = [argument] if argument.startswith("--config=") else [config, argument]
    assert says in refusal(commands.run("train", f"--workdir={workdir}", *given))
    assert not workdir.exists()


def test_every_variant_of_rlvr_builds() -> None:
    names = variants("rlvr")[1:]
    assert {"quick", "tiny", "smol", "verifiers", "qwen25", "qwen3"} == set(names)
    built = {name: module("rlvr").get_config(name) for name in names}
    for config in built.values():
        RlvrConfig.of(config)
        assert config.is_locked
    assert len({config.to_json() for config in built.values()}) == len(built)
    assert module("rlvr").get_config().to_json() == built["quick"].to_json()


def test_every_variant_of_leret_builds() -> None:
    names = variants("leret")[1:]
    assert names == ["quick", "tiny", "smol", "qwen3", "llama3"]
    built = {name: module("leret").get_config(name) for name in names}
    for config in built.values():
        LeretConfig.of(config)
        assert config.is_locked
    assert len({config.to_json() for config in built.values()}) == len(built)
    assert module("leret").get_config().to_json() == built["quick"].to_json()


def test_every_variant_of_deepretrieval_builds() -> None:
    names = variants("deepretrieval")[1:]
    assert names == ["quick", "tiny", "ir", "smol", "beir", "pubmed", "remake"]
    built = {name: module("deepretrieval").get_config(name) for name in names}
    for config in built.values():
        for field in ("train", "test"):  # real data are the user's to name
            config.queries[field] = config.queries[field] or "some/folder,train"
        systems.check(config)
        assert config.is_locked
    assert len({config.to_json() for config in built.values()}) == len(built)
    assert module("deepretrieval").get_config().to_json() == built["quick"].to_json()
