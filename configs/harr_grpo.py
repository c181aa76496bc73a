"""HARR with GRPO: a query encoder learns inside an agent that searches (arXiv 2602.03645).

    qrag train --config=configs/harr_grpo.py:tiny

`:tiny` runs in seconds, offline: invented questions, and the scripted agent, which follows the
data's own decompositions and needs no language model. `:minilm` trains MiniLM over
2WikiMultiHopQA's open corpus; give --config.data.path=FOLDER and --config.search.corpus=FILE.

`:DATA-AGENT-SIZE` chooses each: synthetic, two_wiki, hotpotqa or musique; scripted, react,
search_r1 or planner; tiny, minilm, or the published Qwen3-Embedding-0.6b or 4b. All agents but
the scripted one ask a language model: a running server (--config.llm.url, --config.llm.model), or
one that is started (--config.llm.server.model).
"""

from configs import common_harr


def get_config(arg: str = "tiny"):
    return common_harr.get_config("grpo", arg)
