"""The exact search over a corpus, as a program of the suite gpu, and what is asked of it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.report import Case
from qrag_jax.retrieval.device_vectors import BFLOAT16, Layout, rows_of
from qrag_jax.retrieval.exact import ExactSettings, make_search
from qrag_jax.retrieval.search_plan import GROUP, Wanted, plan_of
from qrag_jax.retrieval.top_groups import Part
from qrag_jax.runtime.device_speeds import speeds_of
from qrag_jax.runtime.dry_run import Program

SEARCH = "search"
MOST_SCORES = 0.25  # of a batch, that may exist at once; where there are so many:
MANY = 2**30
LEAST_SHARE = 0.5  # of what the products or the vectors' bytes take at the device's peaks
_FLOATS = re.compile(r"\b(?:f32|bf16|f16)\[([\d,]+)\]")


class CorpusSize(NamedTuple):
    """A corpus without its passages.

    passages: their number.
    width: numbers of a vector, bfloat16.
    queries: of a batch.
    k: passages that are wanted of each.
    """

    name: str
    passages: int
    width: int
    queries: int
    k: int


WIKIPEDIA = CorpusSize("Wikipedia-21M", 21_015_324, 1024, 1024, 100)  # DPR's passages
TINY_CORPUS = CorpusSize("tiny-corpus", 100_003, 64, 64, 10)


def search_program(size: CorpusSize, mesh: Mesh) -> Program:
    """The search of one batch, from shapes alone."""
    layout = Layout(size.passages, size.width, rows_of(size.passages, mesh.size, GROUP), BFLOAT16)
    # The files hold bfloat16, too, so nothing is scored again on the host.
    groups = ExactSettings(BFLOAT16).candidates_of(size.k)
    plan = plan_of(layout, Wanted(size.queries, size.k, groups), on_cpu=False)
    rows = layout.rows * mesh.size
    vectors: Any = jax.ShapeDtypeStruct((rows, size.width), jnp.bfloat16)
    allowed: Any = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    queries = jax.ShapeDtypeStruct((size.queries, size.width), jnp.float32)
    return Program(SEARCH, make_search(mesh, plan, False), (queries, Part(vectors, None, allowed)))


def least_seconds(size: CorpusSize, devices: int, device_kind: str) -> float | None:
    """What a search takes at the peaks of its devices: by its products, or by reading vectors."""
    speeds = speeds_of(device_kind)
    if speeds is None:
        return None
    numbers = size.passages * size.width / devices
    by_products = 2 * numbers * size.queries / speeds.peak("bf16")
    return max(by_products, 2 * numbers / speeds.bandwidth)


def largest_scores(text: str, size: CorpusSize) -> float:
    """The largest array of floats beside the vectors, as a share of all scores of a batch.

    Args:
        text: the HLO of the compiled program.
    """
    shapes = {tuple(map(int, found.split(","))) for found in _FLOATS.findall(text)}
    # The vectors, and blocks of them, end in their width; scores of that width are small.
    counts = [int(np.prod(shape)) for shape in shapes if shape[-1] != size.width]
    return max(counts, default=0) / (size.queries * size.passages)


def search_figures(size: CorpusSize, devices: int, device_kind: str, text: str) -> dict[str, Any]:
    """What is asked of a search alone, as JSON holds it."""
    return {
        "least_seconds": least_seconds(size, devices, device_kind),
        "largest_scores": largest_scores(text, size) * devices,  # of one device's share
        "many_scores": size.queries * size.passages // devices >= MANY,
    }


def search_faults(row: dict[str, Any]) -> list[str]:
    """One sentence if the scores of a batch exist whole although they are many."""
    share = row.get("largest_scores", 0.0)
    if not row.get("many_scores") or share <= MOST_SCORES:
        return []
    return [f"holds {share:.0%} of a batch's scores at once"]


def search_cases(name: str, row: dict[str, Any]) -> list[Case]:
    """How near the estimated time of a search is to the peaks of its devices."""
    least, estimate = row.get("least_seconds"), row.get("estimate")
    if least is None or estimate is None:
        return []
    share = least / estimate["seconds"]
    asked = row["many_scores"]
    return [
        Case(
            f"{name}: share of the roofline, estimated",
            share,
            "",
            target=f"at least {LEAST_SHARE:g}" if asked else None,
            holds=share >= LEAST_SHARE if asked else None,
            details={
                "at the peaks, ms": least * 1e3,
                "largest array of scores, share of all": row["largest_scores"],
            },
        )
    ]
