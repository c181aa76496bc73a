"""HotpotQA + MuSiQue, and with `:wiki` 2WikiMultihopQA too: the paper's mixtures, by size.

    python -m qrag_jax.train --config=configs/hotpotqa_musique.py --config.data.path=FOLDER

FOLDER has one sub-folder a source (`hotpotqa`, `musique`, `two_wiki`), or give
`--config.data.path=hotpotqa=FOLDER1,musique=FOLDER2`; without a path the data come from the hub.
Of their whole training data that makes 82 : 18, with 2Wiki 33 : 7 : 60; with
`--config.data.mixture=weights` the weights alone decide (`config.data.sources.NAME.weight`).
Constants as in Q-RAG's GTE run (arXiv 2511.07328), lengths and steps cut to fit the 512 positions
of Contriever. It needs a GPU; cost and score were not measured. `:tiny` runs in seconds, offline.
"""

from configs import common


def get_config(arg: str = ""):
    """Config of variant `arg`: "", "wiki" or "tiny"."""
    wiki = ("two_wiki",) if arg == "wiki" else ()
    config = common.get_config("hotpotqa", "musique", *wiki)
    config.data.mixture = "size"
    config.data.max_chunk_tokens_in_state = 110
    config.env.max_steps = 4
    config.policy.alpha = 0.005
    config.pqn.lambda_ = 0.6
    config.optimizer.learning_rate = 5e-6
    config.optimizer.weight_decay = 1e-3
    config.optimizer.schedule = "linear"
    config.train.steps = 70_000
    config.train.batch_size = 8
    config.train.accumulation = 2
    return common.variant(config, arg, ("", "wiki", "tiny"))
