from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertModel

from qrag_jax.errors import InputError
from qrag_jax.models.files.model_folder import read_config, read_tensors
from qrag_jax.models.trunks.bert import Bert, BertConfig
from qrag_jax.models.trunks.bert_weights import (
    name_table,
    params_from_tensors,
    save_folder,
    tensors_from_params,
)
from tests.models.conftest import numpy_tensors, torch_bert, write_tokenizer


def config_of(model: BertModel) -> BertConfig:
    return BertConfig.from_dict(model.config.to_dict(), "test")


def padded_batch(vocab: int, length: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[B, length]` that are 0 (the padding id) past each row's length, and lengths."""
    tokens = np.random.default_rng(0).integers(1, vocab, (len(lengths), length))
    tokens[np.arange(length) >= np.array(lengths)[:, None]] = 0
    return tokens.astype(np.int32), np.array(lengths, np.int32)


def test_genuine_minilm_gives_the_recorded_embeddings(
    minilm_folder: Path, data_folder: Path
) -> None:
    reference = np.load(data_folder / "minilm_ref.npz")
    config = BertConfig.from_dict(read_config(minilm_folder), str(minilm_folder))
    params = params_from_tensors(read_tensors(minilm_folder), config, str(minilm_folder))
    mask = reference["attention_mask"]
    tokens = jnp.asarray(reference["input_ids"], jnp.int32)
    hidden = Bert(config).hidden_states(params, tokens, jnp.asarray(mask.sum(1), jnp.int32))
    pooled = (np.asarray(hidden) * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    normed = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(normed, reference["normed"], atol=1e-5, rtol=0)


def test_tree_is_that_of_the_module() -> None:
    model = torch_bert(num_hidden_layers=3)
    params = params_from_tensors(numpy_tensors(model), config_of(model), "test")
    made = jax.eval_shape(Bert(config_of(model)).init_params, jax.random.key(0))
    same = jax.tree.map(lambda ours, theirs: ours.shape == theirs.shape, params, made)
    assert all(jax.tree.leaves(same))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    assert len(jax.tree.leaves(params)) == len(name_table())


@pytest.mark.parametrize("prefix", ["", "bert.", "model.", "0.auto_model."])
@pytest.mark.parametrize("old_norms", [False, True])
def test_names_round_trip_bit_for_bit(prefix: str, old_norms: bool) -> None:
    model = torch_bert(num_hidden_layers=3)
    tensors = numpy_tensors(model)
    given = {prefix + name: tensor for name, tensor in tensors.items()}
    if old_norms:
        given = {
            name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
            for name, tensor in given.items()
        }
        assert any(name.endswith("gamma") for name in given)
    given[prefix + "embeddings.position_ids"] = np.arange(24)[None]
    given[prefix + "pooler.dense.weight"] = np.ones((16, 16), np.float32)
    given["cls.predictions.bias"] = np.ones(60, np.float32)
    back = tensors_from_params(params_from_tensors(given, config_of(model), "test"))
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)
        assert back[name].flags.c_contiguous


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_dtypes_become_float32(dtype: Any) -> None:
    model = torch_bert()
    given = {name: tensor.astype(dtype) for name, tensor in numpy_tensors(model).items()}
    back = tensors_from_params(params_from_tensors(given, config_of(model), "test"))
    for name, tensor in given.items():
        assert back[name].dtype == np.float32
        np.testing.assert_array_equal(back[name], tensor.astype(np.float32))


def test_params_do_not_alias_the_tensors_they_came_from() -> None:
    model = torch_bert()
    tensors = numpy_tensors(model)
    params = params_from_tensors(tensors, config_of(model), "test")
    for tensor in tensors.values():
        tensor[...] = 7
    assert all(not (leaf == 7).any() for leaf in jax.tree.leaves(params))


def test_every_problem_is_listed_at_once() -> None:
    model = torch_bert()
    tensors = {f"bert.{name}": tensor for name, tensor in numpy_tensors(model).items()}
    del tensors["bert.encoder.layer.1.attention.self.query.weight"]
    del tensors["bert.embeddings.LayerNorm.bias"]
    tensors["bert.embeddings.word_embeddings.weight"] = np.ones((61, 16), np.float32)
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    tensors[name] = tensors[name].T
    tensors["bert.encoder.layer.0.output.dense.bias"] = np.ones(16, np.int8)
    tensors["bert.encoder.layer.2.output.dense.bias"] = np.ones(16, np.float32)
    with pytest.raises(InputError) as caught:
        params_from_tensors(tensors, config_of(model), "here/model.safetensors")
    told = str(caught.value)
    assert told.startswith("here/model.safetensors: ")
    assert "bert.encoder.layer.1.attention.self.query.weight (16, 16) is missing" in told
    assert "bert.embeddings.LayerNorm.bias (16,) is missing" in told
    assert "word_embeddings.weight has shape (61, 16), expected (60, 16)" in told
    assert f"{name} has shape (16, 40), expected (40, 16)" in told
    assert "bert.encoder.layer.0.output.dense.bias is int8, expected a float dtype" in told
    assert "bert.encoder.layer.2.output.dense.bias (16,) has no place" in told
    assert told.count(";") == 5


def test_another_architecture_is_refused() -> None:
    with pytest.raises(InputError, match=r"embeddings\.word_embeddings\.weight \(60, 16\) is miss"):
        params_from_tensors({"wte.weight": np.ones((60, 16))}, config_of(torch_bert()), "gpt")


def hub_folder(folder: Path, model: BertModel) -> dict[str, Any]:
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return read_config(folder)


def test_saved_folder_is_read_by_transformers(tmp_path: Path) -> None:
    model = torch_bert(num_hidden_layers=3)
    config = hub_folder(tmp_path / "in", model) | {"torch_dtype": "float16"}
    params = params_from_tensors(read_tensors(tmp_path / "in"), config_of(model), "test")
    params = jax.tree.map(jnp.asarray, params)
    save_folder(params, config, tmp_path / "in", tmp_path / "deep" / "out")
    back = BertModel.from_pretrained(tmp_path / "deep" / "out", add_pooling_layer=False).eval()
    assert back.dtype == torch.float32
    tokens, lengths = padded_batch(60, 9, [9, 3])
    mask = torch.from_numpy((np.arange(9) < lengths[:, None]).astype(np.float32))
    given = {"input_ids": torch.from_numpy(tokens).long(), "attention_mask": mask}
    with torch.no_grad():
        expected, found = model(**given)[0], back(**given)[0]
    np.testing.assert_allclose(found[mask > 0], expected[mask > 0], atol=1e-5, rtol=0)
    for name, tensor in numpy_tensors(model).items():
        np.testing.assert_array_equal(numpy_tensors(back)[name], tensor)
    ids = AutoTokenizer.from_pretrained(tmp_path / "deep" / "out")("a b c")["input_ids"]
    assert ids == [4, 5, 1]


def test_bfloat16_params_are_saved_as_such(tmp_path: Path) -> None:
    model = torch_bert()
    config = hub_folder(tmp_path / "in", model)
    params = params_from_tensors(numpy_tensors(model), config_of(model), "test")
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    save_folder(params, config, tmp_path / "in", tmp_path / "out")
    back = BertModel.from_pretrained(tmp_path / "out", add_pooling_layer=False, dtype="auto")
    assert back.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16()), name


def test_sentence_transformers_files_are_copied(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    model = torch_bert()
    config = hub_folder(source, model)
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in paths.items()
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "sentence_bert_config.json").write_text("{}")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (source / "1_Pooling" / "key.txt").write_text("x")  # of no format
    params = params_from_tensors(numpy_tensors(model), config_of(model), "test")
    save_folder(params, config, source, out)
    copied = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert copied == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
    }
    save_folder(params, config, out, out)  # onto itself
    assert (out / "1_Pooling" / "config.json").read_text() == '{"pooling_mode_mean_tokens": true}'


def test_save_folder_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    model = torch_bert()
    params = params_from_tensors(numpy_tensors(model), config_of(model), "test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: has none of tokenizer\.json, vocab\.txt"):
        save_folder(params, {}, tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    config = hub_folder(tmp_path / "in", model)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        save_folder(params, config, tmp_path / "in", tmp_path / "file")
    (tmp_path / "in" / "modules.json").write_text("{}x")
    with pytest.raises(InputError, match=r"modules\.json"):
        save_folder(params, config, tmp_path / "in", tmp_path / "out")
