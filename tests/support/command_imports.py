"""What commands import, except the modules that define flags; for `tests.support.forks`."""

import absl.app  # noqa: F401
import matplotlib.figure  # noqa: F401
import ml_collections.config_flags  # noqa: F401
import qrag_jax.systems.saved_token_run
import scipy.stats  # noqa: F401

import qrag_jax.evaluators.evaluation
import qrag_jax.llm.client
import qrag_jax.metrics.stopping
import qrag_jax.runtime.writers
import qrag_jax.systems.q_rag
import qrag_jax.systems.q_rag_scoring

qrag_jax.runtime.writers._summary_writer()
