"""What a program of the suite gpu does that it should not."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_search import search_faults
from qrag_jax.runtime.targets import CUDA


def faults(row: dict[str, Any]) -> list[str]:
    """One sentence for each fault of a program; nothing if all is well.

    Args:
        row: what `gpu_cases` or `lowered` found; the latter cannot see what is sent.
    """
    if "failed" in row:
        return [f"does not compile: {row['failed']}"]
    found, layers = search_faults(row), row["layers"]
    if row["platform"] == CUDA:
        if row["learns"] and row["attention_backward"] < layers:
            found.append(f"{row['attention_backward']} fused gradients for {layers} layers")
        if row["attention_forward"] < layers:
            found.append(f"{row['attention_forward']} fused attentions for {layers} layers")
        if row["attention_unfused"]:
            found.append(f"{row['attention_unfused']} products of attention that is not fused")
    if row["float32_unnamed"]:
        found.append(f"a product of float32: {row['float32_unnamed'][0]}")
    if row["asks_host"]:
        found.append(f"waits for the host in {row['asks_host'][0]}")
    if sent := row.get("sends_inside_branches"):
        found.append(f"sends where a device may not come: {sent[0]}")
    if row["platform"] == CUDA and (added := row.get("nondeterministic")):  # a TPU adds in order
        found.append(f"adds in no fixed order in {added[0]}")
    if row["donated"] < row["state_arrays"] - 1:  # the constant key may be passed through
        found.append(f"{row['donated']} of {row['state_arrays']} arrays of the state are reused")
    return found
