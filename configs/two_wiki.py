"""2WikiMultihopQA: take two to four supporting paragraphs out of ten.

    qrag train --config=configs/two_wiki.py --config.data.path=FOLDER

FOLDER holds the official `train.json` and `dev.json`, or `train*`/`dev*` files in their format.
Without a path the data come from the hub. `:minilm` trains MiniLM on a CPU from the supporting
facts: fact EM rises from 0.58 to 0.96 on 80 dev questions (three trainings; 276 training questions;
7 minutes on one core of an AMD EPYC, 2026-12-01); docs/which.md has its scores over a corpus.
`:tiny` runs in seconds, offline.

`:contriever`, `:e5`, `:gte`, `:qwen3` train those, of the hub or --config.encoder.path=FOLDER.
"""

from configs import common


def get_config(arg: str = ""):
    config = common.get_config("two_wiki")
    config.env.max_steps = 4
    config.data.update(max_chunk_tokens=110, max_chunk_tokens_in_state=110)
    return common.variant(config, arg, common.LABELLED)
