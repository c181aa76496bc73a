"""Shows runs on one page of HTML: learning curves, and what each episode did, step by step.

    python -m qrag_jax.show runs/one runs/other --out=both.html

A run is its folder, or one log in it. Of a folder the page has the learning curves and the newest
log of its evaluations; without one, the sample of episodes that its training kept. The page needs
no server or network. The scores of all files of predictions in the folders are printed as a table.
"""

from __future__ import annotations

import os
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.evaluators import run_page
from qrag_jax.runtime import commandline
from qrag_jax.runtime.whole_files import write_whole, writing

OUT = flags.DEFINE_string("out", None, "File to write; default RUN/show.html of the first RUN.")
EPISODES = flags.DEFINE_integer(
    "episodes", 10_000, "Episodes shown of each log, spread evenly over it; 0: all.", lower_bound=0
)
RUNS: list[str] = []  # the words that are no flags


def main() -> int:
    if not RUNS:
        raise InputError("give the folder of a run, or a log in it, for example runs/quickstart.")
    paths = [*{os.path.realpath(each): Path(each) for each in RUNS}.values()]
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    out = Path(OUT.value) if OUT.value else first / "show.html"
    if out.is_dir():
        raise InputError(f"--out={out} is a folder; give the name of a file, such as show.html.")
    table = run_page.score_table(paths)
    runs, sections = zip(*(run_page.shown(path, EPISODES.value) for path in paths), strict=True)
    shown = [section for section in sections if section is not None]
    title = ", ".join(dict.fromkeys(run["name"] for run in runs))
    episodes = sum(len(each["episodes"]) for each in shown)
    about = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {episodes} episodes."
    page = run_page.page(title, about, runs, shown)
    with writing(out, "--out"):
        write_whole(out, page)
    notes = [(run["name"], note) for run in runs for note in run["notes"]]
    notes += [(each["title"], note) for each in shown for note in each["notes"]]
    for line in (*table, *(f"{name}: {note}" for name, note in notes)):
        print(line)
    print(f"{out}: {about} {len(page) / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    commandline.run(main, words=RUNS)
