"""Towers of every family keep their vectors in sentence-transformers, without a further module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
import pytest

from configs import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.files.sentence_transformers import write_modules
from qrag_jax.models.pretrained import VECTOR_SCALE, LoadedEncoder, load_encoder, with_new_adapters
from qrag_jax.systems import towers_export
from tests.support.parity import our_vectors
from tests.support.small_models import write_small_model

sentence_transformers = pytest.importorskip("sentence_transformers")

TOLERANCE = 1e-5
RELATIVE = 1e-6  # of the largest number
FAMILIES = (
    *("bert", "xlm-roberta", "new", "qwen3"),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("modernbert", "mpnet", "nomic_bert")),
)
WORDS = ["the moth", "is it a moth?", "b a", "a", ""]


def model(folder: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def two_towers(loaded: LoadedEncoder) -> Any:
    """As after training: the second tower has moved away from the first."""
    rng = np.random.default_rng(0)

    def moved(leaf: np.ndarray) -> np.ndarray:
        return leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32)

    return jax.tree.map(lambda leaf: np.stack([leaf, moved(leaf)]), loaded.params)


@pytest.fixture
def config() -> ml_collections.ConfigDict:
    config = hotpotqa.get_config("tiny")
    config.data.update(max_question_tokens=9, max_chunk_tokens=20, max_chunk_tokens_in_state=9)
    return config


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bert", {}),
        ("bert", {"pooling": "cls", "normalise": True, "scale": 3.0}),
        ("xlm-roberta", {"state_prefix": "query: ", "chunk_prefix": "passage: "}),
        ("qwen3", {"scale": 1.0, "state_prefix": "Find the thing.\nQuery:"}),
        ("qwen3", {"pooling": "mean", "normalise": False, "scale": 0.1}),
    ],
)
def test_every_family_keeps_its_vectors(
    family: str, settings: dict[str, Any], config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    loaded = load_encoder(write_small_model(family, tmp_path / "model"), **settings)
    params = two_towers(loaded)
    separator = loaded.tokenizer.backend.id_to_token(loaded.encoder.sep_id)
    state, chunk = towers_export.towers(loaded, config)
    for tower, parts in (
        (state, [["the moth"], ["the moth", "a b"], ["b", "a", "a"]]),
        # A separator that a chunk's own text has is text.
        (chunk, [[text] for text in (*WORDS, f"a {separator} b")]),
    ):
        towers_export.write_tower(loaded, tower, params, tmp_path / tower.name)
        expected = our_vectors(loaded, params, tower, parts)
        found = model(tmp_path / tower.name).encode([separator.join(texts) for texts in parts])
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        assert np.abs(expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_merged_and_kept(
    family: str, config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    folder = write_small_model(family, tmp_path / "model")
    loaded = with_new_adapters(load_encoder(folder, scale=1.0), LoraConfig(3, 6.0), seed=0)
    rng = np.random.default_rng(1)
    trained = jax.tree.map(
        lambda leaf: rng.standard_normal((2, *leaf.shape)).astype(np.float32) / 4, loaded.adapters
    )
    params = Adapted(loaded.params, trained)
    unadapted = load_encoder(folder, scale=1.0)
    for tower in towers_export.towers(loaded, config):
        towers_export.write_tower(loaded, tower, params, tmp_path / tower.name)
        found = model(tmp_path / tower.name).encode(["the moth", "b a"])
        expected = our_vectors(loaded, params, tower, [["the moth"], ["b a"]])
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        before = our_vectors(
            unadapted, two_towers(unadapted), tower._replace(number=0), [["the moth"], ["b a"]]
        )
        assert np.abs(found - before).max() > 100 * TOLERANCE


def test_a_tokenizer_that_reads_joined_parts_otherwise_is_refused(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    folder = write_small_model("xlm-roberta", tmp_path / "model")
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    # The first word of a text gets its space, the first one behind a separator does not.
    settings["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": True,
    }
    path.write_text(json.dumps(settings))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_encoder(folder)
    state, chunk = towers_export.towers(loaded, config)
    towers_export.write_tower(loaded, chunk, two_towers(loaded), tmp_path / "chunk")
    with pytest.raises(
        InputError, match=r"state: the run's tokenizer cannot be exported, since .* 'Who wrote"
    ):
        towers_export.write_tower(loaded, state, two_towers(loaded), tmp_path / "state")


# ---------------------------------------------------------------------- the scale


def modules_of(folder: Path) -> list[str]:
    return [m["type"].rpartition(".")[2] for m in json.loads((folder / "modules.json").read_text())]


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def exported_towers(
    loaded: LoadedEncoder, config: ml_collections.ConfigDict, out: Path
) -> list[towers_export.Tower]:
    out.mkdir()
    both = towers_export.towers(loaded, config)
    for tower in both:
        towers_export.write_tower(loaded, tower, two_towers(loaded), out / tower.name)
    return list(both)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_scale_is_in_the_weights(
    family: str, pooling: str, config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    folder = write_small_model(family, tmp_path / "model")
    load = {"pooling": pooling, "normalise": False}
    loaded, unscaled = (load_encoder(folder, scale=scale, **load) for scale in (0.1, 1.0))
    towers = exported_towers(loaded, config, tmp_path / "out")
    exported_towers(unscaled, config, tmp_path / "unscaled")
    for tower in towers:
        out = tmp_path / "out" / tower.name
        assert modules_of(out) == ["Transformer", "Pooling"]
        found = model(out).encode(WORDS)
        expected = our_vectors(loaded, two_towers(loaded), tower, [[text] for text in WORDS])
        assert largest_difference(found, expected) < RELATIVE
        theirs = 0.1 * model(tmp_path / "unscaled" / tower.name).encode(WORDS)
        assert largest_difference(found, theirs) < RELATIVE
        # Our loader does not apply Q-RAG's 0.1 to it again, whatever else is set.
        for settings in ({}, load):
            again = load_encoder(out, **settings)
            assert (again.encoder.scale, again.encoder.pooling) == (1.0, pooling)
            params = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), again.params)
            back = our_vectors(again, params, tower, [[text] for text in WORDS])
            assert largest_difference(back, expected) < RELATIVE


def test_a_scale_behind_the_norm_stays_a_module(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    folder = write_small_model("bert", tmp_path / "model")
    loaded = load_encoder(folder, pooling="mean", normalise=True, scale=3.0)
    for tower in exported_towers(loaded, config, tmp_path / "out"):
        out = tmp_path / "out" / tower.name
        assert modules_of(out) == ["Transformer", "Pooling", "Normalize", "Dense"]
        np.testing.assert_allclose(np.linalg.norm(model(out).encode(WORDS), axis=1), 3, rtol=1e-6)
        assert load_encoder(out).encoder.scale == 3.0


def test_the_library_keeps_what_the_export_says_of_its_scale(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    loaded = load_encoder(write_small_model("bert", tmp_path / "model"))
    assert loaded.encoder.scale == 0.1
    exported_towers(loaded, config, tmp_path / "out")
    model(tmp_path / "out" / "chunk").save(str(tmp_path / "saved"))
    assert load_encoder(tmp_path / "saved").encoder.scale == 1.0


def test_older_exports_have_their_scale_in_a_module(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    folder = write_small_model("bert", tmp_path / "model")
    unscaled = load_encoder(folder, scale=1.0)
    for tower in exported_towers(unscaled, config, tmp_path / "out"):
        out = tmp_path / "out" / tower.name
        (out / "1_Pooling" / "config.json").unlink()
        (out / "1_Pooling").rmdir()
        write_modules(
            out,
            pooling="mean",
            normalise=False,
            scale=0.25,
            width=unscaled.encoder.width,
            max_tokens=tower.max_tokens,
            pooler=True,
        )
        fields = json.loads((out / "config.json").read_text())
        del fields[VECTOR_SCALE]
        (out / "config.json").write_text(json.dumps(fields))
        assert modules_of(out) == ["Transformer", "Pooling", "Dense"]
        loaded = load_encoder(out)
        assert loaded.encoder.scale == 0.25
        params = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), loaded.params)
        expected = our_vectors(loaded, params, tower, [[text] for text in WORDS])
        assert largest_difference(model(out).encode(WORDS), expected) < RELATIVE


@pytest.mark.parametrize("value", [0, -1.0, "0.1", True, float("inf")])
def test_a_broken_scale_in_the_config_is_refused(value: Any, tmp_path: Path) -> None:
    folder = write_small_model("bert", tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {VECTOR_SCALE: value}))
    with pytest.raises(InputError, match=r"config\.json: qrag_jax_vector_scale is .* a number"):
        load_encoder(folder)
