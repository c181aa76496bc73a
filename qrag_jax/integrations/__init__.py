"""A search as a retriever of other libraries: one module each, imported by its name.

The adapters take what searches, the most passages (None: those of all steps; more than the steps:
each step gives several), and `search_kwargs`: where, steps, beam, threshold of `Retriever.search`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from qrag_jax.retrieval.multi_step import Hit


@runtime_checkable
class Searches(Protocol):
    """`qrag_jax.Retriever` with an index open, or `remote.RemoteRetriever`."""

    def search(self, *questions: Any, **settings: Any) -> list[Hit]:
        """See `Retriever.search`."""


def metadata_of(hit: Hit) -> dict[str, Any]:
    """The passage's metadata, then its title (if it has one) and the step that found it."""
    title = {"title": hit.title} if hit.title else {}
    return {**hit.metadata, **title, "step": hit.step}


@contextlib.contextmanager
def imported(module: str, package: str, extra: str) -> Iterator[None]:
    """Around the imports of a library: says what to install if it is missing.

    `extra` is ours that asks for this package; also the adapter's name.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise ModuleNotFoundError(
            f"qrag_jax.integrations.{extra} needs the package {package}: run pip install "
            f"'qrag_jax[{extra}]'",
            name=error.name,
        ) from None
