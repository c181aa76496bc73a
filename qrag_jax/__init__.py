"""qrag_jax: retrievers that search in several steps, trained by reinforcement learning in JAX."""

__version__ = "0.1.0"
