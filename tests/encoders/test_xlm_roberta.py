"""XLM-R and RoBERTa against Hugging Face's in torch, and their folders in and out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, XLMRobertaModel

from qrag_jax.encoders.bert import Bert
from qrag_jax.encoders.packing import Blocks
from qrag_jax.encoders.precision import Precision
from qrag_jax.encoders.pretrained import load_encoder, save_encoder
from qrag_jax.encoders.ragged import embed_rows
from qrag_jax.encoders.text_encoder import TextEncoder
from qrag_jax.encoders.weights import params_from_tensors, tensors_from_params
from qrag_jax.encoders.xlm_roberta import ROBERTA_TABLE, XLM_ROBERTA_TABLE, XlmRobertaConfig
from qrag_jax.errors import InputError
from tests.encoders.conftest import numpy_tensors, torch_xlm_roberta, write_unigram_tokenizer

TOLERANCE = 1e-4
PAD = 1
LENGTHS = np.array([22, 1, 7, 2, 21], np.int32)  # the first is the longest row there can be
SIZES: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 3, "num_attention_heads": 3, "hidden_size": 24},
    {"roberta": True, "type_vocab_size": 2, "hidden_act": "gelu_new"},
]
TEXTS = ["the moth", "query: what is a moth?", "x"]


def ours(model: XLMRobertaModel) -> tuple[TextEncoder, Any]:
    config = XlmRobertaConfig.from_dict(model.config.to_dict(), "test")
    module = Bert(config)
    params = params_from_tensors(XLM_ROBERTA_TABLE, module, numpy_tensors(model), "test")
    width = config.hidden_size
    return TextEncoder(module, width, config.longest_row, 0, 2, PAD, scale=1.0), params


def rows(lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Tokens `[B, 22]`; their positions come from the padding, so none of a row is padding."""
    tokens = np.random.default_rng(0).integers(2, 60, (len(lengths), 22)).astype(np.int32)
    tokens[np.arange(22) >= lengths[:, None]] = PAD
    return tokens


def theirs(model: XLMRobertaModel, tokens: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every layer's hidden states `[B, L, H]` and the means `[B, H]`."""
    mask = torch.from_numpy(tokens != PAD).long()
    output = model(
        input_ids=torch.from_numpy(tokens).long(), attention_mask=mask, output_hidden_states=True
    )
    inside = mask[..., None].float()
    pooled = (output.last_hidden_state * inside).sum(1) / inside.sum(1)
    return list(output.hidden_states), pooled


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_layer_vector_and_gradient_equals_hugging_face(sizes: dict[str, Any]) -> None:
    model = torch_xlm_roberta(**sizes)
    encoder, params = ours(model)
    assert encoder.max_positions == 22
    tokens = rows()
    inside = tokens != PAD
    target = np.random.default_rng(1).normal(size=(len(LENGTHS), encoder.width)).astype(np.float32)
    states, expected = theirs(model, tokens)
    (expected * torch.from_numpy(target)).sum().backward()
    for depth in range(len(states)):
        shallow = dataclasses.replace(encoder.module.config, num_hidden_layers=depth)
        cut = params | {"layers": jax.tree.map(lambda leaf, n=depth: leaf[:n], params["layers"])}
        if depth == 0:
            continue  # the embeddings; a trunk without layers has nothing to stack
        found = Bert(shallow).hidden_states(cut, tokens, LENGTHS)
        np.testing.assert_allclose(
            np.asarray(found)[inside], states[depth].detach().numpy()[inside], atol=TOLERANCE
        )

    @jax.jit
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        embedded = encoder.embed(params, tokens, LENGTHS)
        return (embedded * target).sum(), embedded

    (_, embedded), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(embedded, expected.detach(), atol=TOLERANCE)
    found = tensors_from_params(XLM_ROBERTA_TABLE, gradient)
    parameters = dict(model.named_parameters())
    assert set(found) == set(parameters)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        wanted = parameter.grad.numpy()
        assert np.abs(wanted).max() > 0 or "key.bias" in name, name
        np.testing.assert_allclose(found[name], wanted, atol=TOLERANCE, err_msg=name)
    # The rows of the table before the first position are no token's.
    assert np.abs(found["embeddings.position_embeddings.weight"][: PAD + 1]).max() == 0


def test_company_changes_no_vector() -> None:
    encoder, params = ours(torch_xlm_roberta())
    tokens = rows()
    together = np.asarray(jax.jit(encoder.embed)(params, tokens, LENGTHS))
    for i, length in enumerate(LENGTHS):
        alone = encoder.embed(params, tokens[i : i + 1, :length], LENGTHS[i : i + 1])
        np.testing.assert_allclose(alone[0], together[i], atol=1e-6)
    blocks = Blocks((30, 60), (7, 22), (3.0, 20.0))
    packed, _ = jax.jit(embed_rows, static_argnums=(0, 1))(encoder, blocks, params, tokens, LENGTHS)
    np.testing.assert_allclose(packed, together, atol=1e-6)


def test_bfloat16_stays_close() -> None:
    encoder, params = ours(torch_xlm_roberta(num_hidden_layers=3))
    half = jnp.dtype(jnp.bfloat16)
    other = encoder.module.clone(precision=Precision(half, half))
    exact, found = (
        np.asarray(dataclasses.replace(encoder, module=module).embed(params, rows(), LENGTHS))
        for module in (encoder.module, other)
    )
    cosine = (exact * found).sum(-1) / np.linalg.norm(exact, axis=-1)
    cosine /= np.linalg.norm(found, axis=-1)
    assert 0.999 < cosine.min() < 1 - 1e-9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch_xlm_roberta().save_pretrained(tmp_path / "model")
    write_unigram_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def their_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Hugging Face's tokenizer, model and mean, of a folder."""
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np")
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        return theirs(model, batch["input_ids"])[1].numpy()


def our_vectors(folder: Path, texts: list[str], **settings: Any) -> np.ndarray:
    loaded = load_encoder(folder, scale=1.0, **settings)
    encoder = loaded.encoder
    texts_ids = loaded.tokenizer.encode(texts)
    made = [[*encoder.state_opening, *ids, encoder.sep_id] for ids in texts_ids]
    lengths = np.array([len(row) for row in made], np.int32)
    tokens = np.array([row + [encoder.pad_id] * (22 - len(row)) for row in made], np.int32)
    return np.asarray(encoder.embed(loaded.params, tokens, lengths))


def test_a_folder_gives_hugging_faces_vectors(folder: Path) -> None:
    encoder = load_encoder(folder, chunk_prefix="passage: ").encoder
    assert (encoder.opening_id, encoder.sep_id, encoder.pad_id) == (0, 2, PAD)
    assert len(encoder.chunk_opening) == 3  # <s> ▁passage :
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("mean", False, 0.1)
    np.testing.assert_allclose(our_vectors(folder, TEXTS), their_vectors(folder, TEXTS), atol=1e-5)
    asked = [f"query: {text}" for text in ("the moth", "x")]
    found = our_vectors(folder, ["the moth", "x"], state_prefix="query: ")
    np.testing.assert_allclose(found, their_vectors(folder, asked), atol=1e-5)


def test_a_saved_folder_is_read_by_transformers(folder: Path, tmp_path: Path) -> None:
    for name in ("sentencepiece.bpe.model", "chat_template.jinja"):  # kept whatever is in them
        (folder / name).write_bytes(b"as it was")
    save_encoder(load_encoder(folder), folder, tmp_path / "out")
    for name in ("sentencepiece.bpe.model", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == b"as it was"
        (folder / name).unlink()
    back = AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
    assert isinstance(back, XLMRobertaModel)
    for name, tensor in torch_xlm_roberta().state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    found = their_vectors(tmp_path / "out", TEXTS)
    np.testing.assert_allclose(our_vectors(tmp_path / "out", TEXTS), found, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "roberta.", "0.auto_model."])
def test_names_round_trip_bit_for_bit(prefix: str) -> None:
    model = torch_xlm_roberta(roberta=True)
    config = XlmRobertaConfig.from_dict(model.config.to_dict(), "test")
    tensors = numpy_tensors(model)
    given = {prefix + name: tensor for name, tensor in tensors.items()}
    given[prefix + "pooler.dense.weight"] = np.ones((16, 16), np.float32)
    given["lm_head.bias"] = np.ones(60, np.float32)
    params = params_from_tensors(ROBERTA_TABLE, Bert(config), given, "test")
    back = tensors_from_params(ROBERTA_TABLE, params)
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"model_type": "new", "architectures": ["NewModel"]},
            "the architecture 'new' (NewModel) is not supported; use a folder whose model_type is "
            "one of bert, qwen3, xlm-roberta, roberta.",
        ),
        ({"pad_token_id": 23}, "pad_token_id 23, but max_position_embeddings is 24"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"max_position_embeddings": 20}, "has shape (24, 16), expected (20, 16)"),
    ],
)
def test_models_that_are_not_computed(folder: Path, fields: dict[str, Any], told: str) -> None:
    edit_json(folder / "config.json", **fields)
    with pytest.raises(InputError) as caught:
        load_encoder(folder)
    assert str(folder) in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_of_another_architecture() -> None:
    config = torch_xlm_roberta().config.to_dict() | {"model_type": "bert"}
    with pytest.raises(InputError, match="'bert' is not computed here, only xlm-roberta or robert"):
        XlmRobertaConfig.from_dict(config, "test")
