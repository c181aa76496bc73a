"""What only a GPU can show: cuDNN's attention, exact float32 products, and runs that repeat.

Everything here is skipped where JAX finds no GPU. The other tests run on a GPU, too, as far as they
need one device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.attention import causal_attention, padded_attention
from qrag_jax.models.compute.precision import FUSED, Precision, precision
from qrag_jax.models.embedding import TextEncoder
from qrag_jax.models.trunks.families import BertConfig
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from tests.entry_points import ROOT, SHARED, assert_same_run, end, wait_for_step
from tests.reference import embed

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX finds no GPU here")

HALF = jnp.dtype(jnp.bfloat16)
BATCH, LENGTH, HEADS = 5, 66, 4
LENGTHS = np.array([66, 1, 2, 33, 64], np.int32)
INSIDE = (np.arange(LENGTH) < LENGTHS[:, None])[..., None, None]


def by_definition(heads: tuple, causal: bool) -> jax.Array:
    """softmax(QKᵀ/√d)·V in float32, without any kernel of a library."""
    query, key, value = heads
    share = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, share, axis=2) for x in (key, value))
    place = np.arange(LENGTH)
    seen = (place < LENGTHS[:, None])[:, None, None] & np.ones((LENGTH, 1), bool)
    if causal:
        seen = seen & (place <= place[:, None])
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


@pytest.mark.parametrize(
    ("causal", "groups", "width"), [(False, HEADS, 32), (True, HEADS, 64), (True, 2, 128)]
)
def test_cudnns_attention_is_that_of_the_definition(causal: bool, groups: int, width: int) -> None:
    rng = np.random.default_rng(width + groups)
    query, cotangent = (rng.standard_normal((BATCH, LENGTH, HEADS, width)) for _ in range(2))
    key, value = (rng.standard_normal((BATCH, LENGTH, groups, width)) for _ in range(2))
    half = [jnp.asarray(x, HALF) for x in (query, key, value)]
    # Gradients come from real positions alone, as those of a pooled encoder do.
    pulled = jnp.where(INSIDE, jnp.asarray(cotangent, HALF), 0)

    def fused(*heads):
        attention = causal_attention if causal else padded_attention
        found = attention(*heads, jnp.asarray(LENGTHS), Precision(HALF, HALF, FUSED))
        return jnp.where(INSIDE, found, 0)

    def plain(*heads):
        return jnp.where(INSIDE, by_definition(heads, causal), 0)

    program = jax.jit(lambda *heads: jax.vjp(fused, *heads)[0]).lower(*half).compile()
    assert "__cudnn$fmha" in program.as_text()
    found, pull = jax.vjp(jax.jit(fused), *half)
    expected, pull_expected = jax.vjp(plain, *(x.astype(jnp.float32) for x in half))
    pairs = [(found, expected)]
    pairs += zip(pull(pulled), pull_expected(pulled.astype(jnp.float32)), strict=True)
    for one, reference in pairs:
        one, reference = np.asarray(one, np.float32), np.asarray(reference)
        assert np.linalg.norm(one - reference) <= 0.01 * np.linalg.norm(reference)
        # Each row by itself: a row of one token must not hide behind a long one.
        for row, wanted in zip(one, reference, strict=True):
            assert np.linalg.norm(row - wanted) <= 0.04 * np.linalg.norm(wanted) + 0.01


def embedded(dtype: str, device: jax.Device) -> list[np.ndarray]:
    """Embeddings of a BERT of MiniLM's width, and the gradient of a loss, on a device."""
    module = Transformer(
        BertConfig(300, 384, 3, 12, 1536),
        precision(dtype, Platform.of(make_mesh((1, 1, 1), [device]))),
    )
    encoder = TextEncoder(
        module=module, width=384, max_positions=512, sep_id=3, pad_id=0, scale=1.0
    )
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(encoder.module.init_params, jax.random.key(0))

    def fill(path, leaf):
        return 0.05 * rng.standard_normal(leaf.shape, np.float32) + (path[-1].key == "scale")

    params = jax.tree_util.tree_map_with_path(fill, shapes)
    tokens = rng.integers(5, 300, (BATCH, LENGTH), np.int32)
    wanted = rng.standard_normal((BATCH, 384), np.float32)

    def loss(params):
        found = embed(encoder, params, tokens, jnp.asarray(LENGTHS))
        return ((found - wanted) ** 2).mean(), found

    with jax.default_device(device):
        given = jax.device_put(params, device)
        gradients, found = jax.jit(jax.grad(loss, has_aux=True))(given)
    # In one: the gradient of a key's bias is 0, so rounding is all that there is of it.
    whole = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(gradients)])
    return [np.asarray(found), whole]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-5), ("bfloat16", 0.05)])
def test_an_encoder_computes_as_on_a_cpu(dtype: str, most: float) -> None:
    """float32 products are not rounded to TF32, which would be off by 3e-4 and more."""
    expected = embedded("float32", jax.devices("cpu")[0])
    for one, reference in zip(embedded(dtype, jax.devices()[0]), expected, strict=True):
        assert np.linalg.norm(one - reference) <= most * np.linalg.norm(reference)


def start(workdir: Path, *fields: str) -> subprocess.Popen[str]:
    """A training by the user's command."""
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda,cpu"}
    own |= {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "programs")}
    return subprocess.Popen(
        [sys.executable, "-m", "qrag_jax.train", *fields, f"--workdir={workdir}"],
        cwd=ROOT,
        env=os.environ | own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def train(workdir: Path, *fields: str) -> None:
    process = start(workdir, *fields)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]


@pytest.mark.parametrize(
    "config", ["hotpotqa", "harr_grpo", "harr_ppo", "rlvr", "leret", "deepretrieval"]
)
def test_every_system_trains(config: str, tmp_path: Path) -> None:
    """PPO's programs have equal gradients of attention, of the policy and of the critic."""
    train(tmp_path / "run", f"--config=configs/{config}.py:tiny")
    assert (tmp_path / "run" / "learning_curve.png").exists()


def test_a_run_repeats_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """In bfloat16, with cuDNN's attention: run twice, and killed and started again."""
    for name in ("first", "again"):
        train(tmp_path / name, *SHARED)
    process = start(tmp_path / "killed", *SHARED)
    wait_for_step(process, tmp_path / "killed", 10)
    end(process, signal.SIGKILL)
    train(tmp_path / "killed", *SHARED)
    for name in ("again", "killed"):
        assert_same_run(tmp_path / name, tmp_path / "first")
