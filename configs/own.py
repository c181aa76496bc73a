"""Data of your own: JSON lines, CSV, Parquet or a data set of the Hugging Face hub.

    qrag train --config=configs/own.py:minilm --config.data.path=FOLDER \\
      --config.data.columns.question=query --config.data.columns.chunks=passages

FOLDER holds `train*` and `dev*` files; of one file a tenth is held out. `docs/own_data.md` has the
schema. Data without `support` need another reward: `--config.reward.name=answer_in_chunk`, or that
of a language model. An episode takes as many chunks as the training question with the most
supporting facts needs, unless `--config.env.max_steps` says otherwise. `:minilm` trains MiniLM on a
CPU by rewards, `:labels` from the supporting facts; `:tiny` runs in seconds, offline, on invented
questions in this schema.
"""

from configs import common


def get_config(arg: str = ""):
    config = common.get_config("own")
    config.env.max_steps = 0
    return common.variant(
        config, arg, {**common.VARIANTS, "labels": (common.minilm, common.from_labels)}
    )
