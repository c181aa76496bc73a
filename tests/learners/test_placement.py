"""Weights on the mesh: as they were read, where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.learners import placement
from qrag_jax.learners.state import Parts
from qrag_jax.learners.update import Learner
from qrag_jax.models.files.model_folder import open_tensors, write_shards
from qrag_jax.models.files.weight_names import expected_shapes, stored_params
from qrag_jax.models.trunks.families import BERT_TABLE, BertConfig
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.runtime.mesh import ALL_SPLIT, shardings_of
from tests.devices import mesh_of

MODULE = Transformer(BertConfig(64, 64, 4, 2, 1024, 32))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_placed_is_what_was_read(tmp_path: Path, dtype: Any) -> None:
    rng, shapes = np.random.default_rng(0), expected_shapes(BERT_TABLE, MODULE)
    arrays = {n: rng.random(s, np.float32).astype(dtype) for n, s in shapes.items()}
    write_shards(tmp_path, arrays, 10**5 if dtype == np.float32 else 10**9)
    tree = stored_params(BERT_TABLE, MODULE, open_tensors(tmp_path), str(tmp_path))
    host = jax.tree.map(np.asarray, tree)
    for sizes in ((1, 1), (2, 4), (1, 8)):
        mesh = mesh_of(*sizes)
        shardings = shardings_of(mesh, ALL_SPLIT, tree, tree)
        if sizes == (2, 4):  # the axis of layers is split where no other fits, or it is asked for
            shardings["layers"]["query"]["kernel"] = NamedSharding(mesh, PartitionSpec("fsdp"))
        placed = placement.place(tree, shardings)
        for leaf, array, where in zip(*map(jax.tree.leaves, (placed, host, shardings))):
            assert (leaf.sharding, leaf.dtype) == (where, np.float32)
            np.testing.assert_array_equal(leaf, array)
    parts = Parts(optax.adam(1.0), has_targets=True)
    shardings = parts.shardings(mesh, ALL_SPLIT, tree)
    rate = optax.constant_schedule(1.0)
    learner = Learner(mesh=mesh, shardings=shardings, parts=parts, schedule=rate)
    both = [learner.first_state(each, 1)._replace(key=()) for each in (tree, host)]
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding == other.sharding
    jax.tree.map(np.testing.assert_array_equal, both[0].params, both[0].target_params)
