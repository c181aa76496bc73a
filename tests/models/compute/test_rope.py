import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.rope import rotate
from tests.reference import rotated


@pytest.mark.parametrize("positions", [[0, 1, 18, 139], [0, 1023, 1024, 399_999]])
def test_halves_are_rotated_by_the_definition(positions):
    embeddings = np.random.default_rng(0).normal(size=(4, 24)).astype(np.float32)
    got = rotate(jnp.asarray(embeddings), jnp.asarray(positions), max(positions))
    expected = [rotated(e, p) for e, p in zip(embeddings, positions, strict=True)]
    np.testing.assert_allclose(got, expected, atol=3e-6)


def test_position_0_changes_nothing_and_lengths_are_kept():
    embeddings = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 16)), jnp.float32)
    np.testing.assert_array_equal(rotate(embeddings, jnp.zeros((3, 2), int), 0), embeddings)
    turned = rotate(embeddings, jnp.full((3, 2), 7), 7)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(embeddings, axis=-1), rtol=1e-6
    )
    assert not np.allclose(turned, embeddings)


def test_inner_products_of_two_rotated_depend_on_their_distance_alone():
    a, b = jnp.asarray(np.random.default_rng(2).normal(size=(2, 32)), jnp.float32)

    def product(p, q):
        return jnp.vdot(rotate(a, jnp.int32(p), 2000), rotate(b, jnp.int32(q), 2000))

    np.testing.assert_allclose(product(3, 11), product(1503, 1511), rtol=1e-4)


def test_the_gradient_is_the_rotation_back():
    embedding, cotangent = jnp.asarray(np.random.default_rng(3).normal(size=(2, 16)), jnp.float32)
    gradient = jax.vjp(lambda e: rotate(e, jnp.int32(5), 9), embedding)[1](cotangent)[0]
    np.testing.assert_allclose(rotate(gradient, jnp.int32(5), 9), cotangent, atol=1e-6)
