"""Shows runs on one page of HTML: learning curves, and what each episode took, step by step.

    python -m qrag_jax.show runs/quickstart
    python -m qrag_jax.show runs/one runs/other --out=both.html

A run is its folder, or one log in it. Of a folder the page has the learning curves and the newest
log of its evaluations; without one, the sample of episodes that its training kept. The page needs
no server, and its script reaches no network.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.evaluators.shown.page import page
from qrag_jax.evaluators.shown.places import find
from qrag_jax.evaluators.shown.sections import run_of, section_of
from qrag_jax.runtime import commandline
from qrag_jax.runtime.whole_files import write_whole

OUT = flags.DEFINE_string("out", None, "File to write; default RUN/show.html of the first RUN.")
EPISODES = flags.DEFINE_integer(
    "episodes", 10_000, "Episodes shown of each log, spread evenly over it; 0: all.", lower_bound=0
)
RUNS: list[str] = []  # the words that are no flags


def main() -> int:
    """Finds what there is, reads it, writes the page and says what it lacks."""
    if not RUNS:
        raise InputError("give the folder of a run, or a log in it, for example runs/quickstart.")
    places = find([Path(each) for each in RUNS])
    first = places[0].path
    out = (
        Path(OUT.value) if OUT.value else (first if first.is_dir() else first.parent) / "show.html"
    )
    if out.is_dir():
        raise InputError(f"--out={out} is a folder; give the name of a file, such as show.html.")
    runs = [run_of(place) for place in places]
    sections = [each for place in places if (each := section_of(place, EPISODES.value)) is not None]
    title = ", ".join(dict.fromkeys(run.name for run in runs))
    episodes = sum(len(each.episodes) for each in sections)
    about = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {episodes} episodes."
    made = page(title, about, runs, sections)
    with commandline.writing(out, "--out"):
        write_whole(out, made)
    told = [(run.name, run.notes) for run in runs] + [(each.title, each.notes) for each in sections]
    for name, notes in told:
        for note in notes:
            print(f"{name}: {note}")
    print(f"{out}: {about} {len(made) / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    commandline.run(main, words=RUNS)
