"""qrag_jax: retrievers that search in several steps, trained by reinforcement learning in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qrag_jax.systems.retriever import Endpoints, LoadSettings, Retriever

__version__ = "0.1.0"
__all__ = ["Endpoints", "LoadSettings", "Retriever", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports what programs use when they ask for it: `import qrag_jax` itself stays cheap."""
    if name in __all__:
        from qrag_jax.systems import retriever

        return getattr(retriever, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
