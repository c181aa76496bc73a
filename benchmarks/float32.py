"""The matrix products that are computed from float32 factors on purpose; no other may be.

On a GPU such a product runs at a fraction of the speed of one in bfloat16. Each has the einsum that
it is written as, by which JAX names it in compiled programs.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.hlo import Product

NAMED = {
    "rt,td->rd": "mean pooling (models.heads.embedding): sums whose results are embeddings",
    "...hd,...chd->...ch": "Q-values (policies.soft_q), exact because actions hang on them",
    "...d,...kd->...k": "scores of a pool (policies.plackett_luce), likewise",
    "rd,d->r": "values of a critic (learners.query_encoder)",
    "bnd,bwd->bwn": "Q-values of long documents (policies.document_scores), likewise",
    "bnd,bwnd->bwn": "the same with positions relative to the chunks taken",
}
# JAX's own attention, with which TPUs compute: its scores are float32, and so is their gradient.
NAMED_ON_TPU = {"BTNH,BSNH->BNTS": "the gradient of attention's scores (jax.nn)"}
# Products of attention that no fused kernel computes: JAX's own, and those of models.compute.
_ATTENTION = ("BTNH,BSNH->BNTS", "BNTS,BSNH->BTNH", "nqd,nkd->nqk", "nqk,nkd->nqd", "nqk,nqd->nkd")


def unnamed(products: Iterable[Product], platform: str) -> list[str]:
    """The products that are not computed in float32 on purpose, as `result = factors, source`.

    Args:
        products: those of float32 factors.
        platform: "cuda" or "tpu".
    """
    names = [*NAMED, *(NAMED_ON_TPU if platform == "tpu" else ())]
    return sorted(
        {
            f"{product.shapes}, {product.source[-80:] or 'of unknown source'}"
            for product in products
            if not any(name in product.source for name in names)
        }
    )


def of_attention(products: Iterable[Product]) -> int:
    """The number of products of attention that no fused kernel computes."""
    return sum(any(name in product.source for name in _ATTENTION) for product in products)
