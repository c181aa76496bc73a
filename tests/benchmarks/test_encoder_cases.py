"""What the encoders suite times side by side is the same computation; its FLOPs are counted."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from benchmarks.encoder_cases.speed import BERT_BASE, QWEN3, XLM_R_BASE, Model, Ours, Rows, build
from benchmarks.matmul import Peaks
from benchmarks.measure import forward_flops
from benchmarks.speed_cases.setting import Setting

from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained import family_of, load_encoder
from qrag_jax.models.trunks.bert import BertConfig
from qrag_jax.models.trunks.qwen3 import Qwen3Config
from tests.support.small_models import FAMILIES, training_texts, write_trainable_model
from tests.support.torch_encoder import LEARNING_RATE, Peer, mini_batches

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
QWEN3_SMALL = QWEN3.cut(", small", **SMALL, num_key_value_heads=1, head_dim=8)
MODELS = (BERT_BASE.cut(", small", **SMALL), XLM_R_BASE.cut(", small", **SMALL), QWEN3_SMALL)
SETTING = Setting(quick=True, gpu=False, rounds=1, warmups=1, peaks=Peaks(1.0, 1.0))


def rows() -> Rows:
    lengths = np.array([5, 12, 1, 9, 12, 3], np.int32)
    tokens = np.random.default_rng(0).integers(10, 50, (6, 12)).astype(np.int32)
    return Rows(tokens, lengths, padded_size=6, sorted_size=4)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_both_sides_embed_and_learn_the_same(model: Model) -> None:
    theirs, encoder, params = build(model, "float32")
    given = rows()
    ours, peer = Ours(encoder, params, given, SETTING), Peer(theirs, encoder, "cpu", half=False)
    padded = mini_batches(given.tokens, given.lengths, 6, "cpu", sort=False)
    by_length = mini_batches(given.tokens, given.lengths, 4, "cpu", sort=True)
    assert [tuple(batch.tokens.shape) for batch in by_length] == [(4, 12), (2, 3)]
    vectors = ours.embed()
    np.testing.assert_allclose(peer.embed(padded), vectors, atol=1e-5)
    np.testing.assert_allclose(peer.embed(by_length), vectors, atol=1e-5)

    table = family_of(model.fields, "test").table
    before = {name: p.detach().numpy().copy() for name, p in theirs.named_parameters()}
    target = np.random.default_rng(1).normal(size=vectors.shape).astype(np.float32)
    ours.step(jnp.asarray(target))
    total = peer.step(by_length, torch.from_numpy(target))
    assert total == pytest.approx((vectors * target).sum(), abs=1e-4)
    moved = 0.0
    for name, tensor in tensors_from_params(table, ours.params).items():
        after = dict(theirs.named_parameters())[name].detach().numpy()
        np.testing.assert_allclose(tensor, after, atol=0.05 * LEARNING_RATE, err_msg=name)
        moved = max(moved, np.abs(after - before[name]).max())
    assert moved > 0.5 * LEARNING_RATE


def test_half_precision_is_half_precision() -> None:
    theirs, encoder, _ = build(QWEN3_SMALL, "bfloat16")
    given = rows()
    exact = Peer(theirs, encoder, "cpu", half=False)
    half = Peer(theirs, encoder, "cpu", half=True)
    batches = mini_batches(given.tokens, given.lengths, 6, "cpu", sort=False)
    difference = np.abs(half.embed(batches) - exact.embed(batches)).max()
    assert 1e-6 < difference < 0.1


def test_flops_are_counted_by_hand() -> None:
    bert = BertConfig(50, 16, 3, 2, 24)
    layer = 2 * (4 * 16 * 16 + 2 * 16 * 24) * 7 + 2 * 2 * 16 * (5 * 5 + 2 * 2)
    assert forward_flops(bert, [5, 2]) == 3 * layer
    qwen = Qwen3Config(50, 16, 3, 4, 2, 24, head_dim=8)
    maps = 16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24  # q, k and v, o, SwiGLU's
    pairs = sum(range(1, 6)) + sum(range(1, 3))  # a token and one that it sees
    assert forward_flops(qwen, [5, 2]) == 3 * (2 * maps * 7 + 2 * 2 * 32 * pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_to_train_reads_its_texts(family: str, tmp_path: Path) -> None:
    texts = training_texts()
    loaded = load_encoder(write_trainable_model(family, tmp_path, texts))
    tokens = sum(len(ids) for ids in loaded.tokenizer.encode(texts))
    assert tokens < sum(map(len, texts)) / 2  # words and their parts, not letters
    assert loaded.model_config["model_type"] == family
