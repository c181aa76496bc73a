"""What commands import, except the modules that define flags; for `tests.support.forks`."""

import warnings

import absl.app  # noqa: F401
import matplotlib.figure  # noqa: F401
import ml_collections.config_flags  # noqa: F401
import scipy.stats  # noqa: F401

import qrag_jax.evaluators.evaluation
import qrag_jax.llm.client
import qrag_jax.metrics.stopping
import qrag_jax.runtime.pretrained_files
import qrag_jax.runtime.writers
import qrag_jax.systems.harr.system
import qrag_jax.systems.q_rag.system
import qrag_jax.systems.scoring
import qrag_jax.systems.token_system

# JAX warns of forks, for its threads; there are none before a program is run.
warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
qrag_jax.runtime.pretrained_files.auto_tokenizer()
qrag_jax.runtime.writers._summary_writer()
