"""Shows what runs of a language model with tools have done: a table, curves, a page of episodes.

    python -m qrag_jax.analyze runs/rlvr-quick runs/rlvr-smol

It reads all files of `qrag predict` and `qrag evaluate` and all learning curves in these folders,
and writes into --out: table.txt, a curve-RUN.png for each training, and episodes.html, which shows
episodes token by token: what was observed, sampled and trained, with ids and log-probabilities.
The page is that of `qrag show`, which has the curves on it, too.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.evaluators import analysis
from qrag_jax.runtime import commandline
from qrag_jax.runtime.whole_files import write_whole

OUT = flags.DEFINE_string("out", None, "Folder to write; default FOLDER/analysis of the first.")
EPISODES = flags.DEFINE_integer(
    "episodes", 100, "Episodes shown, spread evenly over the rewards; 0: all.", lower_bound=0
)
FOLDERS: list[str] = []  # the words that are no flags


def main() -> int:
    """Reads the folders, writes the files and prints the table."""
    if not FOLDERS:
        raise InputError("give a folder of a run or of predictions, for example runs/rlvr-quick.")
    places = [Path(each) for each in FOLDERS]
    found = analysis.find(places)
    first = places[0] if places[0].is_dir() else places[0].parent
    out = Path(OUT.value) if OUT.value else first / "analysis"
    lines = analysis.table(found)
    with commandline.writing(out, "--out"):
        if lines:
            write_whole(out / analysis.TABLE, "\n".join(lines) + "\n")
            print("\n".join(lines))
        for file in analysis.write_curves(found, out):
            print(f"curve: {file}")
        if (page := analysis.write_page(found, out, EPISODES.value)) is not None:
            print(f"episodes: {page}")
    return 0


if __name__ == "__main__":
    commandline.run(main, words=FOLDERS)
