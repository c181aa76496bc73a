"""Searches of a test, and what becomes of them."""

from __future__ import annotations

from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.engine import RemoteEngine, RemoteSearch

RIGHT = ("30", "1", "200")


def ids(found: tuple[str, ...] | Failure) -> tuple[str, ...]:
    assert not isinstance(found, Failure), found
    return found


def failure(found: tuple[str, ...] | Failure) -> Failure:
    assert isinstance(found, Failure), found
    return found


def one(
    engine: RemoteEngine, query: str = "a", most: int = 3, until: str = ""
) -> tuple[str, ...] | Failure:
    (found,) = engine.search([RemoteSearch(query, most, until)])
    return found
