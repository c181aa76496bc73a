"""What a program lowered for GPUs shows; nothing here can compile for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_faults import faults
from benchmarks.gpu_rows import Row
from benchmarks.lowered import contents, lowered
from benchmarks.memory_cases import TINY, Model
from qrag_jax.models.trunks.bert import BertConfig

pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
LAYERS = 2  # of the tiny encoder
# Heads of 36: the fused kernel takes widths by steps of 8.
ODD = Model("odd BERT", "bert", BertConfig(512, 72, 2, 2, 128))


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_of_a_tiny_encoder_has_no_fault(lora: bool) -> None:
    found = lowered(Row("h100", TINY, lora, (1, 8, 1), "update"))
    assert faults(found) == []
    # Per layer: chunks (6 shapes) and two states (4), by the online and the target towers; then in
    # learning both (4), each twice, because layers are computed again for the gradient.
    once = LAYERS * ((6 + 2 * 4) * 2 + 2 * 2 * 4)
    assert (found["attention_forward"], found["attention_backward"]) == (once, LAYERS * 2 * 4)
    assert found["donated"] == found["state_arrays"]


@pytest.mark.parametrize(
    ("program", "calls"),
    [("evaluation", LAYERS * (6 + 2 * 4)), ("states", LAYERS * 4), ("scores", 0)],
)
def test_programs_that_do_not_learn_have_no_fault(program: str, calls: int) -> None:
    found = lowered(Row("h100", TINY, False, (2, 2, 2), program))
    assert faults(found) == []
    assert (found["attention_forward"], found["attention_backward"]) == (calls, 0)
    assert found["donated"] == 0


def test_attention_that_is_not_fused_is_a_fault() -> None:
    found = lowered(Row("h100", ODD, False, (1, 1, 1), "states"))
    unfused = "products of attention that is not fused"
    assert [fault.partition(" ")[2] for fault in faults(found)] == [
        "fused attentions for 2 layers",
        unfused,
    ]


def module(function, *arguments, platform="cuda", **options):
    traced = jax.jit(function, **options).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")


SQUARE = np.ones((4, 4), np.float32)


def test_products_in_scans_count_as_often_as_these_run() -> None:
    @jax.jit
    def one(x):
        return jnp.sin(x @ x)

    def scanned(x):
        x = jax.lax.scan(lambda x, _: (one(x), None), one(x), length=3)[0]
        return jax.lax.while_loop(lambda x: x.sum() < 9, one, x)

    found = contents(module(scanned, SQUARE))
    (count,) = [count for (kind, _), count in found.items() if kind == "f32"]
    assert count == 1 + 3 + 1


def test_types_of_products_and_their_names() -> None:
    def mixed(x):
        half = jnp.einsum("ij,jk->ik", x.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
        return half, jnp.einsum("ab,bc->ac", x, x)

    found = {kind: item for kind, item in contents(module(mixed, SQUARE)) if item}
    assert set(found) == {"bf16", "f32"}
    assert "ij,jk->ik" in found["bf16"].source
    assert "ab,bc->ac" in found["f32"].source


def test_calls_of_the_host_and_donations_are_found() -> None:
    def asks(x, y):
        asked = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return asked + 1, y

    # JAX refuses to lower a callback for devices that it has not.
    given_up = {"donate_argnums": (0, 1)}
    with pytest.raises(ValueError, match="different from the lowering platform cuda"):
        module(asks, SQUARE, SQUARE)
    found = contents(module(asks, SQUARE, SQUARE, platform="cpu", **given_up))
    assert [kind for kind, item in found if kind == "host"] == ["host"]
    assert found["donated", None] == 2
    quiet = contents(module(lambda x, y: (x + 1, y), SQUARE, SQUARE))
    assert not [kind for kind, item in quiet if kind == "host"]
    assert quiet["donated", None] == 0
