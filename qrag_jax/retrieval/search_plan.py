"""In which pieces the devices search: the sizes of batches, blocks and spans."""

from __future__ import annotations

from qrag_jax.retrieval.device_vectors import FLOAT32, Layout
from qrag_jax.retrieval.top_groups import Plan

# On a processor a block and its scores stay in the caches. On an accelerator a block's product is
# large enough to be at its peak, and its scores are the largest array of the program.
GROUP = 16  # larger ones cost more when they are scored again, smaller ones have more maxima
_CPU_BATCH, _BATCH = 512, 1024
_CPU_BLOCK = 2048
_CPU_SPAN = 2**18  # passages
_SCORES = 2**28  # of a block, in numbers; 1 GiB
_MAXIMA = 2**28  # of a span, likewise
_BLOCKS = 128  # that are written out in one program; so long it takes to compile
_CPU_GATHERED, _GATHERED = 2**23, 2**29  # numbers of vectors that are scored again at a time
_ALIGNED = 256  # rows of two tiles of an accelerator's products, and of 16 groups


def largest_batch(on_cpu: bool) -> int:
    """Queries that are searched for at a time."""
    return _CPU_BATCH if on_cpu else _BATCH


def padded_batch(count: int) -> int:
    """The batch of so many queries: 1, 8, or a further power of two; each is one program."""
    return 1 if count == 1 else max(8, 1 << (count - 1).bit_length())


def plan_of(layout: Layout, batch: int, k: int, groups: int, on_cpu: bool) -> Plan:
    """How a device searches its part for the k best passages of a batch of queries.

    Args:
        groups: groups that are kept; as many as passages, or more where products are coarse.
    """
    rows = layout.rows
    if on_cpu:
        block, span, unit = _CPU_BLOCK, _CPU_SPAN, GROUP
    else:
        block = max(_SCORES // batch, -(-rows // _BLOCKS))
        span, unit = max(_MAXIMA // batch, 1) * GROUP, _ALIGNED
    # Equal spans of equal blocks, so that little is searched twice.
    spans = -(-rows // span)
    blocks = -(-rows // (spans * block))
    block = min(-(-rows // (spans * blocks * unit)) * unit, rows)
    groups = min(groups, rows // GROUP)
    numbers = _CPU_GATHERED if on_cpu else _GATHERED
    return Plan(
        k=k,
        groups=groups,
        group=GROUP,
        block=block,
        span=blocks,
        gathered=max(min(numbers // layout.width, batch * groups * GROUP), 1),
        half=not on_cpu and layout.storage != FLOAT32,
        unrolled=not on_cpu,
    )


def working_bytes(layout: Layout, on_cpu: bool, k: int = 100) -> int:
    """About the bytes of a device that a search for k passages needs besides the vectors."""
    batch = largest_batch(on_cpu)
    plan = plan_of(layout, batch, k, k, on_cpu)
    scores = batch * plan.block * 4
    maxima = 2 * batch * plan.block // plan.group * plan.span * 4
    copied = plan.block * layout.width * 4 if on_cpu else 0
    return scores + maxima + copied + plan.gathered * layout.width * 4
