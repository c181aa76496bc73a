"""Exported towers and language models: other libraries compute what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from configs import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.export import export_language_model, language_model_card
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.pretrained import LoadedEncoder, LoraConfig, load_encoder, with_new_adapters
from qrag_jax.systems import saved_run
from qrag_jax.systems.config import without_folders
from tests.support.parity import our_vectors
from tests.support.small_models import write_small_model
from tests.systems.small_runs import SMALL, opened_alone

sentence_transformers = pytest.importorskip("sentence_transformers")


TOLERANCE = 1e-5


def read(path: Path) -> Any:
    return json.loads(path.read_text())


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
        ("bert", {"pooling": "cls", "normalise": True, "scale": 3.0}),
        ("bert", {"pooling": "mean"}),
        ("xlm-roberta", {"pooling": "cls", "state_prefix": "query: ", "chunk_prefix": "passage: "}),
        ("new", {"pooling": "last"}),
        ("qwen3", {"pooling": "mean", "state_prefix": "Find the thing.\nQuery:"}),
        ("modernbert", {"pooling": "cls"}),
        ("mpnet", {"pooling": "last"}),
        ("nomic_bert", {"pooling": "mean"}),
    ],
)
def test_every_family_keeps_its_vectors(
    family: str, settings: dict[str, Any], config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    settings = {"normalise": False, "scale": 0.1} | settings
    loaded = load_encoder(write_small_model(family, tmp_path / "model"), **settings)
    params = two_towers(loaded)
    separator = loaded.tokenizer.backend.id_to_token(loaded.encoder.sep_id)
    state, chunk = saved_run.towers(loaded, config)
    for tower, parts in (
        (state, [["the moth"], ["the moth", "a b"], ["b", "a", "a"]]),
        # A separator that a chunk's own text has is text.
        (chunk, [["the moth"], ["b a"], ["a"], [""], [f"a {separator} b"]]),
    ):
        saved_run.write_tower(loaded, tower, params, tmp_path / tower.name)
        expected = our_vectors(loaded, params, tower, parts)
        found = model(tmp_path / tower.name).encode([separator.join(texts) for texts in parts])
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        assert np.abs(expected).max() > 100 * TOLERANCE
        # Only a factor behind a norm is a module, and the loader applies none twice.
        kinds = [m["type"].rpartition(".")[2] for m in read(tmp_path / tower.name / "modules.json")]
        assert ("Dense" in kinds) == settings["normalise"]
        again = load_encoder(tmp_path / tower.name)
        both = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), again.params)
        back = our_vectors(again, both, tower, [parts[0]])
        np.testing.assert_allclose(back, expected[:1], atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "nomic_bert"])
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
    for tower in saved_run.towers(loaded, config):
        saved_run.write_tower(loaded, tower, params, tmp_path / tower.name)
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
    # The first word of a text gets its space, the first one behind a separator does not.
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    for name, fields in (
        ("tokenizer.json", {"pre_tokenizer": first}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / name).write_text(json.dumps(read(folder / name) | fields))
    loaded = load_encoder(folder)
    state, chunk = saved_run.towers(loaded, config)
    saved_run.write_tower(loaded, chunk, two_towers(loaded), tmp_path / "chunk")
    with pytest.raises(InputError, match=r"state: .*'Who wrote"):
        saved_run.write_tower(loaded, state, two_towers(loaded), tmp_path / "state")


def test_transformers_and_peft_compute_what_was_trained(tmp_path: Path) -> None:
    """Adapters of a run by PPO, whose critic is left out."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    tokens = np.array([[5, 70, 300, 12, 44, 120, 7, 9]], np.int32)
    fields = {"model__dtype": "float32", "model__lora__rank": 4, "engine__email": "me@example.org"}
    workdir, out, rng = tmp_path / "run", tmp_path / "out", np.random.default_rng(1)
    config = SMALL["deepretrieval"](**fields)

    def moved(leaf: jax.Array) -> jax.Array:
        noise = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        return jax.device_put(leaf + 0.1 * noise, leaf.sharding)

    with opened_alone(config, workdir) as (system, run):
        state = system.first_state()
        state = state._replace(params=jax.tree.map(moved, state.params))
        run.checkpoints.save_last(5, state, {})
        run.checkpoints.wait()
        lm = system.inputs.model.model
        params = attach(Adapted(system.base[0], state.params), lm.lora_scale)
        ours = np.asarray(lm.logits(params, jnp.asarray(tokens), jnp.array([tokens.shape[1]])))
    export_language_model(workdir, config, "last", out)
    kind = transformers.AutoModelForCausalLM
    with torch.no_grad():
        ids = torch.tensor(tokens).long()
        base = kind.from_pretrained(workdir / "model").eval()
        assert np.abs(ours - base(ids).logits.numpy()).max() > 0.05
        whole = kind.from_pretrained(out).eval()
        np.testing.assert_allclose(whole(ids).logits.numpy(), ours, atol=1e-4)
        adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
        np.testing.assert_allclose(adapted(ids).logits.numpy(), ours, atol=1e-4)
    card = (out / "README.md").read_text()
    assert "value head" in card
    assert "step 5" in card
    assert "me@example.org" not in card
    with pytest.raises(InputError, match="best"):
        export_language_model(workdir, config, "best", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_card_shows_no_folder_or_server_of_the_training_machine() -> None:
    config = SMALL["deepretrieval"](stages=("rl",))
    config.writing.update(prompt="/home/me/mine.txt", form="tagged")
    config.queries.train = "/home/me/scifact,train;/home/me/nfcorpus,train"
    config.model.path = "/home/me/models/chat"
    config.engine.url = config.llm.url = "http://within.example.org:8000"
    card = language_model_card(Path("runs/none"), config, "best")
    for shown in ("mine.txt", "scifact,train;nfcorpus,train", "chat", "value head"):
        assert shown in card
    for hidden in ("/home", "within.example.org"):
        assert hidden not in card


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/me/data/hotpotqa", "hotpotqa"),
        ("/a/scifact,train;~/b/c/nfcorpus,dev", "scifact,train;nfcorpus,dev"),
        ("id=/a/b,other=/c/d", "id=b,other=d"),
        ("/home/me/scifact/,train", "scifact/,train"),
        ("f1 and/or em", "f1 and/or em"),
    ],
)
def test_folders_are_cut(given: str, shown: str) -> None:
    assert without_folders({"a": [{"b": (given, 3)}], "c": None}) == {
        "a": [{"b": (shown, 3)}],
        "c": None,
    }
