"""BabiLong: find the facts of a bAbI story, which are scattered in order among book sentences.

    qrag train --config=configs/babilong.py:qa3 --config.data.path=STORIES \
        --config.data.sources.babilong.noise=BOOKS

STORIES is a folder of bAbI files from `en-valid-10k` (`qa3_train.txt`, `qa3_valid.txt`, …, gzipped
or not). BOOKS is a folder of plain texts. Without them stories and noise are invented (stories only
for qa1 to qa5).

The variant names the task, `:qa1` to `:qa20`, and the size. `:qa3` is the paper's run for
Contriever (arXiv 2511.07328), `:qa3-minilm` fits a CPU, `:qa3-tiny` runs in seconds, offline.
Without a task it is qa1: `:minilm` and `:tiny`.

`:qa1-minilm` (100 steps) reaches fact EM 1.00 on 200 documents of 50 chunks, and 0.98 on 100
documents of 4,600. `:qa2-minilm` (300 steps) reaches 0.95 and 0.89. Both are in float32 (2 cores,
AMD EPYC, 2026-11-22). The paper's run needs a GPU and was not measured.

Score a run at other lengths:
qrag evaluate --workdir=RUN --chunks=50,4600,40000
"""

from configs import common


def get_config(arg: str = ""):
    task = "qa1" if arg in SIZES else arg.partition("-")[0]
    config = common.get_config("babilong")
    config.data.sources.babilong.update(task=task, chunks=100)
    config.data.update(max_question_tokens=32, max_chunk_tokens=64, max_chunk_tokens_in_state=64)
    config.env.update(max_steps=6, sort_by_index=True, positions="relative")
    common.contriever_constants(config)
    config.train.update(steps=50_000, batch_size=12, accumulation=2)  # 72 transitions
    return common.variant(config, arg, VARIANTS)


def _tiny(config):
    config.data.sources.babilong.update(chunks=20, train=64, dev=16)
    config.env.max_steps = 2


def _minilm(config):
    task = config.data.sources.babilong.task
    config.data.sources.babilong.chunks = 50
    config.data.update(max_chunk_tokens=48, max_chunk_tokens_in_state=24)
    config.env.max_steps = {"qa1": 2, "qa2": 4}.get(task, 5)
    config.pqn.tau = 0.05
    config.optimizer.learning_rate = 1e-4
    steps = 100 if task == "qa1" else 300
    config.train.update(
        steps=steps, batch_size=16, log_every=10, eval_every=50, checkpoint_every=50
    )
    config.eval.update(samples=200, batch_size=50)


SIZES = {"": (), "tiny": (common.tiny, _tiny), "minilm": (common.minilm, _minilm)}
TASKS = [f"qa{number}" for number in range(1, 21)]
VARIANTS = SIZES | {
    f"{task}-{size}".rstrip("-"): changes for task in TASKS for size, changes in SIZES.items()
}
