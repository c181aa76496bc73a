"""Every registered encoder against Hugging Face's model of the same folder, and PEFT's adapters.

A new family is tested when `tests.support.small_models.FAMILIES` has it. Rows are packed into
blocks here, while Hugging Face's model computes them one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.ragged import TokenRows
from qrag_jax.models.embedding import TextEncoder
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.first_encoder import load_encoder, save_encoder
from qrag_jax.models.pretrained import (
    ALL_LINEAR,
    LoadedEncoder,
    LoraConfig,
    target_modules,
    write_adapters,
)
from qrag_jax.models.trunks import families
from qrag_jax.runtime import mesh as meshes
from qrag_jax.runtime.mesh import shardings_of
from tests import reference
from tests.devices import mesh_of
from tests.support.adapters import with_adapters
from tests.support.parity import (
    RENAMED,
    check_gradients,
    gradients_in_files,
    hugging_face,
    on_mesh,
    vectors_and_gradient,
)
from tests.support.small_models import FAMILIES, write_small_model
from tests.support.torch_encoder import embed_rows

# Rows longer than ModernBERT's local window, of which two are equal and one is absent.
LENGTHS = np.array([20, 1, 7, 2, 19, 0, 13, 7], np.int32)
BLOCKS = Blocks((40,), (20,), (9.0,))
HALF = jnp.dtype(jnp.bfloat16)
# Further forms of a family: other fields of `config.json`, other computations.
# fmt: off
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "new, scaled": ("new", {"type_vocab_size": 2, "rope_scaling": {"type": "ntk", "factor": 2.0}}),
    "new, other norms": ("new", {
        "type_vocab_size": 0, "layer_norm_type": "rms_norm", "hidden_act": "silu",
        "rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.625},
    }),
    "modernbert, other layers": ("modernbert", {  # local ones first, and a global one at the end
        "num_hidden_layers": 3, "local_attention": 5, "hidden_activation": "silu",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }),
    "nomic_bert, other fields": ("nomic_bert", {
        "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    }),
    "qwen3, biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
}
# fmt: on
CASES = {family: (family, {}) for family in FAMILIES} | FORMS
every_family = pytest.mark.parametrize("case", FAMILIES, indirect=True)


class Case(NamedTuple):
    """A folder, its models, and random rows for both.

    Tokens beyond a row's end are others, which must leave no trace.
    """

    folder: Path
    model: Any
    loaded: LoadedEncoder
    encoder: TextEncoder
    rows: TokenRows
    cotangents: np.ndarray

    def theirs(self, model: Any) -> np.ndarray:
        """Hugging Face's vectors, row by row without padding; parameters get their gradients."""
        vectors = np.zeros_like(self.cotangents)
        model.zero_grad()
        for i in np.flatnonzero(LENGTHS):
            tokens = self.rows.tokens[i : i + 1, : LENGTHS[i]]
            found = embed_rows(model, self.encoder, tokens, LENGTHS[i : i + 1])
            (found * torch.from_numpy(self.cotangents[i])).sum().backward()
            vectors[i] = found.detach().numpy()
        return vectors

    def ours(self) -> tuple[np.ndarray, Any]:
        found = vectors_and_gradient(
            self.encoder, BLOCKS, self.loaded.params, self.rows, self.cotangents
        )
        return jax.tree.map(np.asarray, found)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    known: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in known:
            family, sizes = CASES[name]
            folder = write_small_model(family, tmp_path_factory.mktemp("model"), **sizes)
            loaded = load_encoder(folder)
            # The mean of all tokens, so that the vectors show every hidden state.
            encoder = dataclasses.replace(
                loaded.encoder, pooling="mean", normalise=False, scale=1.0
            )
            rng = np.random.default_rng(0)
            vocab = encoder.module.config.vocab_size
            numbers = rng.integers(vocab - 1, size=(len(LENGTHS), 20))
            tokens = (encoder.pad_id + 1 + numbers) % vocab  # none is padding
            tokens[7, :7] = tokens[2, :7]
            cotangents = rng.normal(size=(len(LENGTHS), encoder.width)).astype(np.float32)
            rows = TokenRows(tokens.astype(np.int32), LENGTHS)
            known[name] = Case(folder, hugging_face(folder), loaded, encoder, rows, cotangents)
        return known[name]

    return case


@pytest.fixture
def case(request: pytest.FixtureRequest, made: Callable[[str], Case]) -> Case:
    return made(request.param)


def test_every_registered_family_is_here() -> None:
    assert set(FAMILIES) == set(families.FAMILIES)


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_packed_vectors_and_gradients_are_hugging_faces_alone(case: Case) -> None:
    vectors, gradient = case.ours()
    np.testing.assert_allclose(vectors, case.theirs(case.model), atol=2e-5)
    assert np.abs(vectors).max() > 0.1
    assert not vectors[LENGTHS == 0].any()
    check_gradients(
        tensors_from_params(case.loaded.table, gradient), gradients_in_files(case.model)
    )


@every_family
def test_padding_leaves_no_trace_and_half_precision_is_near(case: Case) -> None:
    embed = jax.jit(reference.embed, static_argnums=0)
    one = np.pad(case.rows.tokens, ((0, 0), (0, 2)), constant_values=case.encoder.pad_id)
    inside = np.arange(22) < LENGTHS[:, None]
    other = np.where(inside, one, 7).astype(np.int32)
    found = np.asarray(embed(case.encoder, case.loaded.params, one, LENGTHS))
    np.testing.assert_array_equal(embed(case.encoder, case.loaded.params, other, LENGTHS), found)
    expected, _ = case.ours()
    np.testing.assert_allclose(found, expected, atol=1e-5)

    module = case.encoder.module.clone(precision=Precision(HALF, HALF))
    half = dataclasses.replace(case.encoder, module=module)
    rounded = np.asarray(embed(half, case.loaded.params, one, LENGTHS))
    assert rounded.dtype == np.float32
    difference = np.linalg.norm(rounded - found, axis=1) / np.linalg.norm(found, axis=1)
    difference = difference[LENGTHS > 0]
    assert 1e-4 < difference.max() < 5e-2


@every_family
def test_a_saved_folder_is_the_same_for_both(case: Case, tmp_path: Path) -> None:
    save_encoder(case.loaded, case.folder, tmp_path)
    one, two = (load_file(folder / "model.safetensors") for folder in (case.folder, tmp_path))
    trunk = {name.removeprefix("model."): tensor for name, tensor in one.items()}
    trunk.pop("lm_head.weight", None)
    assert trunk.keys() == {name.removeprefix("model.") for name in two}
    theirs = hugging_face(tmp_path).state_dict()
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(theirs[name], tensor), name
    again, texts = load_encoder(tmp_path), ["the moth a b"]
    jax.tree.map(np.testing.assert_array_equal, again.params, case.loaded.params)
    assert again.encoder == case.loaded.encoder
    assert again.tokenizer.encode(texts) == case.loaded.tokenizer.encode(texts)


# RoBERTa's maps have the names of XLM-R's.
ADAPTED = [family for family in FAMILIES if family not in (*RENAMED, "roberta")]


@pytest.mark.parametrize("case", ADAPTED, indirect=True)
def test_adapters_are_those_of_peft(case: Case, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft, the reference for adapters, is missing")
    settings = peft.LoraConfig(
        r=3, lora_alpha=12, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(hugging_face(case.folder), settings).eval()
    model.save_pretrained(tmp_path / "theirs")
    loaded = with_adapters(case.loaded, tmp_path / "theirs")
    encoder = dataclasses.replace(case.encoder, lora_scale=loaded.encoder.lora_scale)
    assert encoder.lora_scale == 4.0
    params = Adapted(loaded.params, loaded.adapters)
    vectors, gradient = vectors_and_gradient(encoder, BLOCKS, params, case.rows, case.cotangents)
    np.testing.assert_allclose(vectors, case.theirs(model), atol=1e-4)
    assert np.abs(vectors - case.ours()[0]).max() > 0.1
    expected: dict[str, Any] = {}
    targets = target_modules(loaded.table, ALL_LINEAR)
    for path, name in targets.items():
        modules = [
            model.base_model.model.get_submodule(name.format(layer))
            for layer in range(model.config.num_hidden_layers)
        ]
        expected[path[-1]] = {
            ours: np.stack([getattr(m, their)["default"].weight.grad.numpy().T for m in modules])
            for ours, their in (("lora_a", "lora_A"), ("lora_b", "lora_B"))
        }
    check_gradients(jax.tree.map(np.asarray, gradient), {"layers": expected})
    write_adapters(tmp_path / "ours", loaded.table, LoraConfig(3, 12.0), loaded.adapters)
    one, two = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("theirs", "ours"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(two[name], tensor, err_msg=name)
    base, ours = hugging_face(case.folder), tmp_path / "ours"
    back = peft.PeftModel.from_pretrained(base, ours, is_trainable=True).eval()
    np.testing.assert_allclose(case.theirs(back), case.theirs(model), atol=1e-6)


@pytest.mark.parametrize("case", [*FAMILIES, "qwen3, biases"], indirect=True)
def test_eight_devices_compute_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are scanned there, and their activations computed again."""
    monkeypatch.setattr(meshes, "LEAST_SPLIT", 1)
    mesh, params, module = mesh_of(2, 2, 2), case.loaded.params, case.encoder.module
    as_there = module.clone(scanned=True, remat="layers")
    encoder = dataclasses.replace(case.encoder, module=as_there)
    shardings = shardings_of(mesh, case.loaded.trunk.partition_rules(), params)
    assert sum(not each.is_fully_replicated for each in jax.tree.leaves(shardings)) > 4
    how = mesh, encoder, BLOCKS, params, shardings
    vectors, gradient = on_mesh(*how, case.rows, case.cotangents)
    expected, whole = case.ours()
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    check_gradients(gradient, whole)
