"""An encoder's vectors and gradients, packed or on a mesh, against Hugging Face's model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from safetensors.numpy import load_file
from transformers import AutoModel

from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import TokenRows, pull_back
from qrag_jax.models.embedding import TextEncoder
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime import mesh as meshes
from tests.reference import embed
from tests.support.torch_encoder import model_options

# Differences of a small gradient are relative to this share of the model's largest gradient. BERT's
# key biases need this: their gradient is 0 in exact arithmetic, so that it is only rounding.
SMALLEST_GRADIENT = 1e-3
RENAMED = ("nomic_bert",)  # whose parameters have other names in transformers than in files


def hugging_face(folder: Path) -> Any:
    """The folder's trunk in torch, float32."""
    options = model_options(read_config(folder)["model_type"])
    model = AutoModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **options
    )
    return model.eval()


def gradients_in_files(model: Any) -> dict[str, np.ndarray]:
    """The gradients of a model's parameters, by the names that the parameters have in files.

    transformers splits and renames some models' parameters as it reads them; so it writes these
    gradients as if they were weights.
    """
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if model.config.model_type not in RENAMED:
        return {name: gradient.numpy() for name, gradient in named.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=named)
        return load_file(Path(folder) / "model.safetensors")


def check_gradients(found: Any, expected: Any, within: float = 1e-4) -> None:
    """Every leaf is near, relative to the largest entry of its own or `SMALLEST_GRADIENT`."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert largest > 0
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        scale = max(np.abs(wanted).max(), SMALLEST_GRADIENT * largest)
        np.testing.assert_allclose(got, wanted, atol=within * scale, err_msg=str(path))


@partial(jax.jit, static_argnums=(0, 1))
def vectors_and_gradient(
    encoder: TextEncoder,
    blocks: Blocks,
    params: Any,
    rows: TokenRows,
    cotangents: Any,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Vectors `[N, D]`, and the gradient of Σ <vector, cotangent>; computed in packed blocks."""
    given = params, rows, jnp.asarray(cotangents)
    gradient, vectors, _ = pull_back(encoder, blocks, *given, dropout_key=dropout_key)
    return vectors, gradient


def on_mesh(
    mesh: Mesh,
    encoder: TextEncoder,
    blocks: Blocks,
    params: Any,
    shardings: Any,
    rows: TokenRows,
    cotangents: Any,
    dropout_key: jax.Array | None = None,
) -> tuple[np.ndarray, Any]:
    """The same, where rows are on all devices of a mesh and `params` lie as `shardings` say."""
    placed = jax.device_put(params, shardings)
    rows, cotangents = meshes.shard_batch(mesh, (rows, cotangents))
    found = vectors_and_gradient(encoder.on(mesh), blocks, placed, rows, cotangents, dropout_key)
    return jax.tree.map(np.asarray, found)


def padded(rows: Sequence[Sequence[int]], pad: int) -> TokenRows:
    """Rows of token ids, as wide as the longest."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), max(lengths)), pad, np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return TokenRows(jnp.asarray(tokens), jnp.asarray(lengths))


def vectors_of(
    loaded: LoadedEncoder,
    texts: Sequence[str | Sequence[str]],
    params: Any = None,
    opening: Sequence[int] | None = None,
) -> np.ndarray:
    """Embeddings `[len(texts), D]` of texts, or of rows that are joined from parts, as in training.

    Args:
        params: of one tower; None: those loaded.
        opening: ids that rows begin with; None: those of states.
    """
    encoder, rows = loaded.encoder, []
    for parts in texts:
        row = list(encoder.state_opening if opening is None else opening)
        for ids in loaded.tokenizer.encode([parts] if isinstance(parts, str) else list(parts)):
            row += [*ids, encoder.sep_id]
        rows.append(row)
    own = loaded.params if params is None else params
    return np.asarray(embed(encoder, own, *padded(rows, encoder.pad_id)))
