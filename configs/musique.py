"""MuSiQue (answerable): take two to four supporting paragraphs out of twenty.

    qrag train --config=configs/musique.py --config.data.path=FOLDER

FOLDER holds `musique_ans_v1.0_train.jsonl` and `musique_ans_v1.0_dev.jsonl`, or `train*`/`dev*`
files in their format. Without a path the data come from the hub. Lengths are those of Q-RAG's
MuSiQue evaluation: 110 tokens, 4 steps. `:tiny` runs in seconds, offline.

`:minilm` trains MiniLM on a CPU from the supporting facts (stage `imitate`). 50 steps of 16
questions raise fact EM from 0.31 to 0.59 on 124 dev questions that are not used to choose the
checkpoint (three trainings; 552 training questions; 9 to 11 minutes on one core of an AMD EPYC,
2026-12-01). By PQN alone (docs/training.md) it is 0.38 (mean of three seeds).

`:contriever`, `:e5`, `:gte`, `:qwen3` train those, of the hub or --config.encoder.path=FOLDER.
"""

from configs import common


def get_config(arg: str = ""):
    config = common.get_config("musique")
    config.env.max_steps = 4
    config.data.update(max_chunk_tokens=110, max_chunk_tokens_in_state=110)
    return common.variant(config, arg, VARIANTS)


def _minilm(config):
    config.data.max_chunk_tokens = 110
    config.imitate.update(steps=50, batch_size=16, distractors=6, shared_by=8)  # of 18 distractors
    config.reward.per_fact_reward = 0.25  # finding all of up to four facts is rare
    config.train.update(steps=60, eval_every=50, checkpoint_every=25)


VARIANTS = common.LABELLED | {"minilm": (*common.LABELLED["minilm"], _minilm)}
