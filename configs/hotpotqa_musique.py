"""The paper's mixtures by size: HotpotQA + MuSiQue, and with `:wiki` also 2WikiMultihopQA.

    qrag train --config=configs/hotpotqa_musique.py --config.data.path=FOLDER

FOLDER has one sub-folder per source (`hotpotqa`, `musique`, `two_wiki`); or give
`--config.data.path=hotpotqa=FOLDER1,musique=FOLDER2`. Without a path the data come from the hub.
With the whole training data the shares are 82 : 18, and with 2Wiki 33 : 7 : 60. With
`--config.data.mixture=weights` only the weights count (`config.data.sources.NAME.weight`).

The constants are those of Q-RAG's GTE run (arXiv 2511.07328), but lengths and steps per episode are
cut to fit the 512 positions of Contriever. The run needs a GPU; cost and score were not measured.
`:tiny` runs in seconds, offline.
"""

from configs import common


def get_config(arg: str = ""):
    wiki = ("two_wiki",) if arg == "wiki" else ()
    config = common.get_config("hotpotqa", "musique", *wiki)
    config.data.mixture = "size"
    config.data.max_chunk_tokens_in_state = 110
    config.env.max_steps = 4
    common.constants(config, alpha=0.005, lambda_=0.6, rate=5e-6, decay=1e-3, final=0.1)
    config.train.update(steps=70_000, batch_size=8, accumulation=2)
    return common.variant(config, arg, {"": (), "wiki": (), "tiny": (common.tiny,)})
