"""Tells an estimated step time in words: the time, what bounds it, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator

from qrag_jax.runtime.step_time import BOUNDS, COLLECTIVES, Estimate, Kind

SHOWN = 10  # kinds of instructions


def lines(found: Estimate, needed: float | None = None) -> Iterator[str]:
    """The estimate in words: the time, what bounds it, the dearest instructions, assumptions.

    Args:
        found: the estimate.
        needed: FLOPs that the task needs; None: unknown.
    """
    yield summary(found, needed)
    for name, kind in dearest(found):
        yield (
            f"  {kind.seconds / max(found.seconds, 1e-12):6.1%}  {_milliseconds(kind.seconds)}  "
            f"{kind.count:g} x {name}"
        )
    yield from assumptions(found)


def summary(found: Estimate, needed: float | None = None) -> str:
    """One line: the time, the share of the peak, and what bounds it."""
    what = "its products" if needed is None else "what the task needs"
    total = max(found.seconds, 1e-12)
    shares = sorted((found.parts.get(bound, 0.0) / total, bound) for bound in BOUNDS)[::-1]
    bounds = ", ".join(f"{bound} {share:.0%}" for share, bound in shares if share >= 0.01)
    return (
        f"estimated {_milliseconds(found.seconds)} a run on {found.speeds.title}, "
        f"{found.share_of_peak(needed):.1%} of its {found.main_type} peak by {what}; "
        f"bound by {bounds}"
    )


def dearest(found: Estimate) -> list[tuple[str, Kind]]:
    """The kinds of instructions that take most, the dearest first."""
    return sorted(found.kinds.items(), key=lambda item: -item[1].seconds)[:SHOWN]


def assumptions(found: Estimate) -> Iterator[str]:
    """What the estimate takes for granted, in sentences."""
    speeds = found.speeds
    peaks = ", ".join(f"{rate / 1e12:.3g} {dtype}" for dtype, rate in speeds.products.items())
    yield (
        f"assumed: peaks of {peaks} TFLOP/s and {speeds.bandwidth / 1e12:.3g} TB/s are reached; "
        f"{speeds.launch * 1e6:.2g} µs to start each of {found.kernels:.0f} kernels, one after the "
        "other; every kernel reads and writes memory, not caches"
    )
    if speeds.host_wait:
        yield (
            f"assumed: the host takes {speeds.host_wait * 1e6:.2g} µs to read how each branch and "
            "each round of an uncounted loop goes on; attention computes padded rows in full"
        )
    for rows, rounds in found.loops.items():
        where = f"of {rows[0]} rows of up to {rows[1]} tokens" if rows else "of unknown course"
        yield f"assumed: a loop {where} takes {rounds:.3g} round(s)"
    if speeds.links and COLLECTIVES in found.parts:
        links = speeds.links
        yield (
            f"assumed: {links.inside / 1e9:.3g} GB/s within a host of {links.host} devices, "
            f"{links.between / 1e9:.3g} GB/s between hosts, {links.inside_latency * 1e6:.2g} and "
            f"{links.between_latency * 1e6:.2g} µs until a collective begins"
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
