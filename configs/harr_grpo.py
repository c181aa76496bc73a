"""HARR with GRPO: a query encoder learns inside an agent that searches (arXiv 2602.03645).

    python -m qrag_jax.train --config=configs/harr_grpo.py:tiny

`:tiny` runs in seconds, offline: invented questions, and the scripted agent, which follows the
data's own decompositions and needs no language model. `:minilm` trains MiniLM over
2WikiMultiHopQA's open corpus; give --config.data.path=FOLDER and --config.corpus.path=FILE.
"""

from configs import common_harr


def get_config(arg: str = "tiny"):
    """Config of variant `arg`: "tiny" or "minilm"."""
    return common_harr.get_config("grpo", arg)
