"""HotpotQA (distractor): take the two supporting paragraphs out of ten.

    qrag train --config=configs/hotpotqa.py --config.data.path=FOLDER

FOLDER holds `hotpot_train_v1.1.json` and `hotpot_dev_distractor_v1.json`, or `train*`/`dev*` files
in their format. Without a path the data come from the hub. The settings are those of Q-RAG's
HotpotQA run (arXiv 2511.07328). `:tiny` runs in seconds, offline.

`:minilm` trains MiniLM on a CPU from the supporting facts (stage `imitate`). 120 steps of 8
questions raise fact EM from 0.36 to 0.74 on 335 dev questions that are not used to choose the
checkpoint (three trainings; 1,233 training questions; 15 to 19 minutes on one core of an AMD EPYC,
2026-12-01). By PQN alone (docs/training.md) it is 0.56 (mean of three seeds).

`:contriever`, `:e5`, `:gte`, `:qwen3` train those, of the hub or --config.encoder.path=FOLDER.

`:musique` is the paper's mixture by size of HotpotQA + MuSiQue, `:musique-wiki` has 2WikiMultihopQA
as well, `:musique-tiny` runs in seconds. FOLDER then has one sub-folder per source (`hotpotqa`,
`musique`, `two_wiki`); or give `--config.data.path=hotpotqa=FOLDER1,musique=FOLDER2`. With the
whole training data the shares are 82 : 18, and with 2Wiki 33 : 7 : 60. With
`--config.data.mixture=weights` only the weights count (`config.data.sources.NAME.weight`). The
constants are those of Q-RAG's GTE run, but lengths and steps per episode are cut to fit the 512
positions of Contriever. The run needs a GPU; cost and score were not measured.
"""

from configs import common


def get_config(arg: str = ""):
    further = {"musique": ("musique",), "wiki": ("two_wiki",)}
    sources = (source for part in arg.split("-") for source in further.get(part, ()))
    config = common.get_config("hotpotqa", *sources)
    return common.variant(config, arg, VARIANTS)


def _minilm(config):
    # Ten passages of a question are all that is searched, so all of them are learned from: 70 steps
    # of 24 questions with two distractors each reach 0.68 (best of two evaluations, seed 42).
    config.imitate.update(steps=120, batch_size=8, learning_rate=5e-5, distractors=0, shared_by=1)
    config.data.max_chunk_tokens_in_state = 126
    config.train.eval_every = 40


def _mixture(config):
    config.data.mixture = "size"
    config.data.max_chunk_tokens_in_state = 110
    config.env.max_steps = 4
    common.constants(config, alpha=0.005, lambda_=0.6, rate=5e-6, decay=1e-3, final=0.1)
    config.train.update(steps=70_000, batch_size=8, accumulation=2)


VARIANTS = common.LABELLED | {
    "minilm": (*common.LABELLED["minilm"], _minilm),
    "musique": (_mixture,),
    "musique-wiki": (_mixture,),
    "musique-tiny": (_mixture, common.tiny),
}
