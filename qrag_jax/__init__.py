"""qrag_jax: retrievers that search in several steps, trained by reinforcement learning in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qrag_jax.data.corpora import read_qrels
    from qrag_jax.metrics.ranking import score_hits
    from qrag_jax.systems.from_python import TrainedRun, evaluate, train
    from qrag_jax.systems.retriever import Endpoints, LoadSettings, Retriever

__version__ = "0.2.0"
__all__ = [
    "Endpoints",
    "LoadSettings",
    "Retriever",
    "TrainedRun",
    "__version__",
    "evaluate",
    "read_qrels",
    "score_hits",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imports what programs use when they ask for it: `import qrag_jax` itself stays cheap."""
    if name in __all__:
        # `train` and `evaluate` are functions; the modules of these names are commands, which are
        # run and never imported.
        modules = {"read_qrels": "data.corpora", "score_hits": "metrics.ranking"}
        modules |= dict.fromkeys(("TrainedRun", "evaluate", "train"), "systems.from_python")
        module = modules.get(name, "systems.retriever")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
