"""What the config leaves to the encoder's folder: settled once, and kept for runs of every age."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_collections
import pytest

from configs import common, hotpotqa, quickstart
from qrag_jax.errors import InputError
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.runtime.saved_config import check_same_config, save_config
from qrag_jax.systems import run_flags
from qrag_jax.systems.q_rag_config import (
    FREE_FIELDS,
    QRagConfig,
    fill_from_saved,
    load_config,
    settled,
)
from tests.models.conftest import torch_bert, write_tokenizer
from tests.models.files.test_sentence_transformers import write_modules
from tests.systems.parts import prepared, samples_of

QRAG = {"pooling": "mean", "normalise": False, "scale": 0.1}
OPEN = {"pooling": "", "normalise": None, "scale": None}


def write_bert(folder: Path, published: bool = True) -> Path:
    torch_bert().save_pretrained(folder)
    write_tokenizer(folder)
    if published:  # as MiniLM was
        write_modules(folder, "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    return folder


def of(encoder: Any) -> dict[str, Any]:
    return {name: getattr(encoder, name) for name in QRAG}


@pytest.fixture
def config(tmp_path: Path) -> ml_collections.ConfigDict:
    config = hotpotqa.get_config("tiny")
    config.encoder.path = str(write_bert(tmp_path / "model"))
    return config


def test_a_new_run_does_as_the_folder_says(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    first = prepared(config, workdir).encoder
    assert of(first) == {"pooling": "mean", "normalise": True, "scale": 1.0}
    saved = settled(config, first)
    assert {name: config.encoder[name] for name in OPEN} == OPEN  # what was given is as it was
    save_config(saved, workdir / "config.json")
    read = load_config(workdir / "config.json")
    assert {name: read.encoder[name] for name in QRAG} == of(first)
    assert of(prepared(read, workdir).encoder) == of(first)
    # Resumed by the same command.
    fill_from_saved(config, read)
    check_same_config(read, config, FREE_FIELDS)
    assert of(prepared(config, workdir).encoder) == of(first)
    other = hotpotqa.get_config("tiny")
    other.encoder.update(path=config.encoder.path, normalise=False)
    fill_from_saved(other, read)
    with pytest.raises(InputError, match=r"encoder\.normalise: the run has True, given is False"):
        check_same_config(read, other, FREE_FIELDS)


@pytest.mark.parametrize("path", ["minilm", "minilm-or-scratch"])
def test_minilm_is_used_as_qrag_uses_berts(path: str, tmp_path: Path) -> None:
    config = hotpotqa.get_config()
    config.encoder.path = path
    folder = write_bert(tmp_path)
    assert of(load_encoder(folder, **QRagConfig.of(config).encoder.load_settings).encoder) == QRAG
    config.encoder.update(pooling="cls", normalise=True, scale=2.0)  # unless it is told otherwise
    expected = {"pooling": "cls", "normalise": True, "scale": 2.0}
    assert (
        of(load_encoder(folder, **QRagConfig.of(config).encoder.load_settings).encoder) == expected
    )


def test_configs_that_minilm_trains() -> None:
    for config in (hotpotqa.get_config("minilm"), quickstart.get_config()):
        settings = QRagConfig.of(config).encoder.load_settings
        assert {name: settings[name] for name in QRAG} == QRAG


def test_encoders_from_scratch_are_used_as_qrag_uses_berts(tmp_path: Path) -> None:
    config = hotpotqa.get_config("tiny")
    config.data.cache = str(tmp_path / "cache")
    samples = samples_of(config, "train").all
    assert of(prepared(config, tmp_path / "run", samples).encoder) == QRAG


def test_prompts_that_are_not_used_are_told(
    config: ml_collections.ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = {"prompts": {"query": "query: ", "document": ""}}
    path = Path(config.encoder.path) / "config_sentence_transformers.json"
    path.write_text(json.dumps(prompts))
    prepared(config, tmp_path / "one")
    told = capsys.readouterr().out
    assert "The model's prompts are not used (query 'query: '); config.encoder.state_prefix" in told
    config.encoder.state_prefix = "a "
    prepared(config, tmp_path / "two")
    assert "prompts" not in capsys.readouterr().out


def test_evaluation_settings_leave_the_encoder_alone(tmp_path: Path) -> None:
    """A whole experiment as --eval_config leaves open what the run has settled."""
    config = settled_config()
    save_config(config, tmp_path / "config.json")
    read = load_config(tmp_path / "config.json")
    root = Path(common.__file__).parent
    run_flags._replace_fields(read, f"{root / 'musique.py'}:tiny")
    assert {name: read.encoder[name] for name in QRAG} == QRAG
    assert read.env.max_steps == 2
    assert list(read.data.sources) == ["musique"]


def settled_config() -> ml_collections.ConfigDict:
    config = hotpotqa.get_config("minilm")
    with config.unlocked():
        config.encoder.update(QRAG)
    return config


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"dropout": 1.0}, r"config.encoder.dropout is 1\.0; it is the share .* from 0 to below 1"),
        ({"dropout": float("nan")}, "config.encoder.dropout is nan"),
        ({"attention_dropout": -0.1}, r"config.encoder.attention_dropout is -0\.1; it is the sha"),
        ({"dropout": 0.1, "lora.rank": 4}, "adapters are trained.* set config.encoder.lora.dropo"),
        ({"attention_dropout": 0.1, "lora.path": "x"}, "adapters are trained"),
    ],
)
def test_dropout_without_sense_is_refused(fields: dict[str, Any], told: str) -> None:
    config = hotpotqa.get_config("tiny")
    config.encoder.update_from_flattened_dict(fields)
    with pytest.raises(InputError, match=told):
        QRagConfig.of(config)


def test_attention_drops_the_same_share_unless_it_is_told(tmp_path: Path) -> None:
    folder, config = write_bert(tmp_path), hotpotqa.get_config("tiny")

    def shares() -> tuple[float, float]:
        encoder = load_encoder(folder, **QRagConfig.of(config).encoder.load_settings).encoder
        return encoder.dropout, encoder.attention_dropout

    assert shares() == (0.0, 0.0)
    config.encoder.dropout = 0.1
    assert shares() == (0.1, 0.1)
    config.encoder.attention_dropout = 0.0
    assert shares() == (0.1, 0.0)
