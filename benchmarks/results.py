"""Writes docs/results.md and the tables of retrievers in README.md and docs/which.md from what is
stored: python -m benchmarks.results

`benchmarks/results/SUITE/DATE-MACHINE.json` are the one home of a figure (`report.store`). `LIST`
says which are shown: the newest one of an idle machine, or, marked, the newest of a busy one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, ROOT, markdown

PAGE, README, WHICH = Path("docs/results.md"), Path("README.md"), Path("docs/which.md")
BEGIN, END = "<!-- results: written by `make results` -->", "<!-- end of results -->"
MOST = 12  # rows of a suite
HEADER = ("what", "value", "peer", "machine", "date")
BUSY = "; other jobs running"
TIMES = re.compile(r"/s$|^(s|ms|minutes)$")  # units of figures that other work changes


class Row(NamedTuple):
    """A row of the page.

    title: what is measured, in the reader's words.
    suite, case: which figure.
    compared: the case whose figure is the peer's, if not the figure's own peer is.
    """

    title: str
    suite: str
    case: str
    compared: str = ""


SUITES = {
    "quality": "Does training help",
    "speed": "Speed on CPUs",
    "gpu": "NVIDIA GPUs",
    "published": "Constants of the published runs",
}
# [SUITE], then a row a line: its title | the case | the case it is compared with, if any.
# A line that begins with blanks continues the last one.
LIST = """
[quality]
Q-RAG from labels, MiniLM, fact EM on HotpotQA (three trainings), compared with PQN (one) |
    hotpotqa/imitate: fact_em, trained | hotpotqa/pqn: fact_em, trained
Q-RAG from labels, MiniLM, fact EM on MuSiQue (three trainings), compared with PQN |
    musique/imitate: fact_em, trained | musique/pqn: fact_em, trained
Q-RAG, MiniLM, share of passages taken that are facts (one training), compared with untrained |
    musique/pqn: fact_precision, trained | musique/pqn: fact_precision, untrained
Q-RAG, the quick start, fact EM, compared with untrained |
    quickstart: fact_em, trained | quickstart: fact_em, untrained
Q-RAG, fact EM on HotpotQA, compared with the public PyTorch code |
    hotpotqa-public: fact_em, trained
Q-RAG, fact EM in documents of 4,600 chunks (BabiLong qa1), compared with 50 chunks |
    long/qa1: fact_em, 4,600 chunks | long/qa1: fact_em, 50 chunks
HARR by GRPO, MiniLM, answer F1 on 2WikiMultiHopQA, compared with untrained |
    harr/grpo-stateful: f1, trained | harr/grpo-stateful: f1, untrained
RLVR, a small decoder, exact match, compared with imitation alone |
    rlvr/grpo: em, trained | rlvr/grpo: em, after imitation
LeReT, a small decoder, all gold found, compared with its script |
    leret/quick: hop2/all_gold, trained | leret/quick: hop2/all_gold, after the script
DeepRetrieval, a small decoder, nDCG@10, compared with its script |
    deepretrieval/quick: ndcg@10, trained |
    deepretrieval/quick: ndcg@10, after the script
Q-RAG from labels, all passages in 4, 2Wiki's open corpus, compared with PQN |
    2wiki/q_rag/imitate: all@4, trained | 2wiki/q_rag/pqn: all@4, trained
The same with BM25 in each step, HotpotQA's open corpus, compared with PQN, fused |
    hotpotqa-pooled/q_rag/imitate: all@4, trained, fused at each step |
    hotpotqa-pooled/q_rag/pqn: all@4, trained, fused with BM25
[speed]
Encoder, BERT-base, float32, compared with PyTorch |
    encoder, BERT-base, float32: forward, 40 chunks of up to 128 tokens
Q-RAG's PQN step, MiniLM, compared with PyTorch | Q-RAG, PQN step, MiniLM, 16 questions
HARR's GRPO, MiniLM, compared with PyTorch with PEFT |
    HARR, GRPO update, MiniLM LoRA r16: tokens of 66 searches
Token GRPO, a small decoder, compared with TRL |
    GRPO update, decoder of 4 × 192, vocabulary 151,936: episodes
Sampler, a small decoder, compared with Hugging Face's generate |
    sampler, decoder of 4 × 192, vocabulary 1,024, 64 prompts of 64 tokens, 64 new ones
Exact search of a million vectors, compared with FAISS |
    exact search, 1,000,000 × 384, float32, top 10, batch 64
BM25, SciFact | BM25, SciFact
`qrag serve`, one step, MiniLM, compared with a plain server |
    server, 64 clients, 2,000 passages, steps: 1
`qrag serve`, four steps | server, 64 clients, 2,000 passages, steps: 4
[gpu]
Q-RAG's step, BERT-base, compared with torch in bfloat16 |
    PQN step, BERT-base, 128 questions of HotpotQA, beside torch
Encoder, BERT-base | encoder, BERT-base, 1,280 chunks of HotpotQA by length
HARR's update | HARR's GRPO, Qwen3-Embedding-0.6B, LoRA, 128 episodes
RLVR's update | RLVR's GRPO, Qwen3-0.6B, LoRA, a block of 16,384 tokens
DeepRetrieval's update | DeepRetrieval's PPO, Qwen3-0.6B, LoRA, policy and critic, 16 queries
Exact search, 1,024 queries in 21 million vectors |
    exact search, 1,024 queries, 21 M × 1,024 numbers, the first 100
Tests that only a GPU can run, of all | tests on a GPU
Memory of Q-RAG's update, E5-large, one H100, compiled |
    h100/multilingual-e5-large, full/1x1x1/update: memory
Memory of Q-RAG's update, Qwen3-Embedding-8B whole, of eight H100s, compiled |
    h100/Qwen3-Embedding-8B, full/1x8x1/update: memory
Memory of RLVR's update, Qwen2.5-7B, LoRA, of eight H100s, compiled |
    h100/Qwen2.5-7B, LoRA r16/1x8x1/GRPO: memory
Published training, E5-large on HotpotQA, bfloat16, one H100, estimated |
    HotpotQA, E5-large with its own word table (hotpotqa.py): a training on one H100, estimated
[published]
Q-RAG, E5-large on HotpotQA, equal of all | published:e5-hotpotqa
HARR by GRPO, 0.6B, HotpotQA | harr_grpo:hotpotqa-react-0.6b
RLVR, Qwen2.5-7B | rlvr:qwen25
"""

# README.md's table: retriever | part | way of the side-by-side, whose `all@4` is shown for both
# corpora. docs/which.md has the rows of `SYSTEMS` instead, and what they cost. A line that begins
# with blanks continues the last one.
RETRIEVERS = """
BM25 | bm25 | untrained
BM25, then with its first passage | bm25-twice | untrained
MiniLM, untrained | minilm | untrained
BM25 and MiniLM, fused | bm25+minilm | untrained
contrastive MiniLM, two searches, fused with BM25 |
    contrastive | trained, then with its first passage, fused with BM25
contrastive MiniLM, trained on questions with their first passages, four searches |
    multi_step_peer | trained
qrag_jax, by rewards (PQN), fused with BM25 | q_rag/pqn | trained, fused with BM25
**qrag_jax, from labels** (`imitate`) | q_rag/imitate | trained
**the same, with BM25 in each step** | q_rag/imitate | trained, fused at each step
"""
SYSTEMS = """
BM25 | bm25 | untrained
BM25, then with its first passage | bm25-twice | untrained
MiniLM | minilm | untrained
BM25 and MiniLM | bm25+minilm | untrained
contrastive, fused with BM25 | contrastive | trained, fused with BM25
contrastive, twice, fused | contrastive | trained, then with its first passage, fused with BM25
contrastive by passages so far, four searches | multi_step_peer | trained
Q-RAG by PQN | q_rag/pqn | trained
Q-RAG by PQN, fused | q_rag/pqn | trained, fused with BM25
the same with mined negatives | q_rag/mined | trained, fused with BM25
Q-RAG, `imitate` | q_rag/imitate | trained
Q-RAG, `imitate`, fused | q_rag/imitate | trained, fused with BM25
Q-RAG, `imitate`, BM25 in each step | q_rag/imitate | trained, fused at each step
Q-RAG, `imitate,pqn` | q_rag/imitate+pqn | trained
HARR, GRPO | harr/grpo | trained
HARR, PPO | harr/ppo | trained
DeepRetrieval, SmolLM2 | deepretrieval | trained
LeReT, SmolLM2 | leret | trained
RLVR, SmolLM2 | rlvr | trained
"""
CORPORA = {"2wiki": "2WikiMultihopQA", "hotpotqa-pooled": "HotpotQA"}
COSTS = {"milliseconds a question": "ms", "CPU minutes of a training": "minutes"}


def listed(text: str = LIST) -> list[Row]:
    """The rows of a list."""
    rows, suite = [], ""
    for title, *cells in _split(text):
        if cells:
            rows.append(Row(title, suite, *cells))
        else:
            suite = title.strip("[]")
    return rows


def _split(text: str) -> list[list[str]]:
    """The cells of each line of a list."""
    joined = re.sub(r"\n +", " ", text.strip()).splitlines()
    return [[cell.strip() for cell in line.split("|")] for line in joined]


def newest(suite: str, folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By its name the newest figure of each case of a suite, of an idle machine if there is one."""
    figures: dict[str, dict[str, Any]] = {}
    files = [json.loads(path.read_text()) for path in sorted((folder / suite).glob("*.json"))]
    for file in sorted(files, key=lambda file: file["date"]):
        for case in file["cases"]:
            state = {name: case.get(name, file.get(name)) for name in ("idle", "commit")}
            figure = case | state | {"machine": file["machine"], "date": file["date"]}
            before = figures.get(case["case"])
            if before is None or undisturbed(figure) or not undisturbed(before):
                figures[case["case"]] = figure
    return figures


def undisturbed(figure: dict[str, Any]) -> bool:
    """Whether other work on the machine did not change a figure."""
    return bool(figure["idle"]) or not TIMES.search(figure["unit"])


def lines(
    rows: Sequence[Row], figures: dict[str, dict[str, dict[str, Any]]]
) -> Iterator[tuple[str, ...]]:
    """The cells of the rows whose figures are there."""
    for row in rows:
        figure = figures[row.suite].get(row.case)
        if figure is not None:
            unit = "" if figure["unit"] == "share" else figure["unit"]
            other = figures[row.suite].get(row.compared, {}).get("value") if row.compared else None
            peer = other if row.compared else figure["peer"]
            shown = (_number(x, unit) for x in (figure["value"], peer))
            date, machine = when_and_where(figure)
            yield (row.title, *shown, machine + ("" if undisturbed(figure) else BUSY), date)


def _number(value: float | None, unit: str) -> str:
    """Three digits, and whole numbers from a thousand on; "" without a value."""
    if value is None:
        return ""
    return f"{value:{',.0f' if abs(value) >= 1000 else '.3g'}} {unit}".strip()


def when_and_where(figure: dict[str, Any]) -> tuple[str, str]:
    """The date and the machine: one that was measured before its file was written says its own."""
    details = figure.get("details", {})
    machine = details.get("machine", figure["machine"]).partition(", Python")[0]
    measured = re.match(r"(\d{4}-\d\d-\d\d), ([^,(]+)", details.get("measured", ""))
    return (measured[1], measured[2].strip()) if measured else (figure["date"], machine)


def page(rows: Sequence[Row], folder: Path = RESULTS) -> str:
    """The whole page.

    Raises:
        ValueError: a suite has too many rows.
    """
    figures = {suite: newest(suite, folder) for suite in SUITES}
    text = [
        "# Results",
        "<!-- Written by `make results` from benchmarks/results/; edit LIST in "
        "benchmarks/results.py. -->",
        "Each row is one figure of `python -m benchmarks --suite SUITE`: the newest, and of times "
        "the newest of an idle machine;\nwhere other jobs ran at the same time, the row says so. "
        "Everything measured, with commits and versions of packages, is in\n"
        "`benchmarks/results/`.",
    ]
    for suite, title in SUITES.items():
        shown = [row for row in rows if row.suite == suite]
        if len(shown) > MOST:
            raise ValueError(f"{suite} has {len(shown)} rows in LIST; at most {MOST} are shown")
        cells = list(lines(shown, figures))
        if cells:
            text += [f"## {title}", f"`--suite {suite}`", markdown(HEADER, cells).rstrip()]
    return "\n\n".join(text) + "\n"


def with_table(text: str, rows: str = RETRIEVERS, folder: Path = RESULTS) -> str:
    """The text of a page with today's table of these rows between the two marks.

    Raises:
        ValueError: a mark is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    figures, costs = newest("quality", folder), COSTS if rows == SYSTEMS else {}
    header = ("retriever", *(name for one in CORPORA.values() for name in (one, *costs.values())))
    cells = []
    for title, part, way in _split(rows):
        cases = [f"{corpus}/{part}: all@4, {way}" for corpus in CORPORA]
        if any(case in figures for case in cases):
            shown = ((_with_interval(figures.get(case)), *_costs(case, folder)) for case in cases)
            cells.append((title, *(cell for one in shown for cell in one[: 1 + len(costs)])))
    table = markdown(header, cells).rstrip()
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def _costs(name: str, folder: Path) -> list[str]:
    """What a case costs by `COSTS`, of its newest figure that says so; else ""."""
    known: dict[str, float] = {}
    for path in sorted((folder / "quality").glob("*.json")):
        for case in json.loads(path.read_text())["cases"]:
            if case["case"] == name:
                known |= {cost: case["details"][cost] for cost in COSTS if cost in case["details"]}
    return [_number(known.get(cost), "") for cost in COSTS]


def _with_interval(figure: dict[str, Any] | None) -> str:
    """Such as "0.773 [0.714, 0.832]"; "" where nothing was measured."""
    if figure is None:
        return ""
    low, high = (figure["details"][name] for name in ("low", "high"))
    return f"{figure['value']:.3f} [{low:.3f}, {high:.3f}]"


def main() -> int:
    """Writes the pages; says which rows of `LIST` nothing was measured for."""
    rows = listed()
    (ROOT / PAGE).write_text(page(rows))
    for path, shown in ((ROOT / README, RETRIEVERS), (ROOT / WHICH, SYSTEMS)):
        path.write_text(with_table(path.read_text(), shown))
    missing = [row for row in rows if row.case not in newest(row.suite)]
    for row in missing:
        print(f"not measured: {row.suite}, {row.case}", file=sys.stderr)
    print(f"{PAGE}: {len(rows) - len(missing)} of {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
