"""Trains and scores one experiment with several seeds and settings, and compares them.

    python -m qrag_jax.sweep --config=configs/quickstart.py --out=runs/rates --seeds=42,43,44 \\
        --set=optimizer.learning_rate=1e-5,3e-5
    python -m qrag_jax.sweep --table runs/rates

Every combination of the values of --set is trained with every seed, one run after the other. Give
the same command again, or only --out, to go on with a sweep that was stopped: finished runs stay as
they are, and a run that was broken off goes on from its last checkpoint. --commands prints a line
for each run that is not done, for a scheduler or another machine, and runs nothing.
"""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.whole_files import write_whole, writing
from qrag_jax.systems.sweep_plan import Plan, markdown, missing, run_all, scored, seeds_of, sets_of

CONFIG = flags.DEFINE_string("config", "", "Experiment, FILE or FILE:VARIANT.")
OUT = flags.DEFINE_string("out", "", "Folder of the sweep.")
SEEDS = flags.DEFINE_list("seeds", ["42"], "Seeds of the trainings, with commas between them.")
SET = flags.DEFINE_multi_string(
    "set", [], "FIELD=VALUE,VALUE of the experiment; may be given several times."
)
SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to score, 0 for all.", lower_bound=0)
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint", "", ["", "best", "last"], "Which checkpoint is scored; default: the command's."
)
SCORE = flags.DEFINE_string("score", "", "Score of the table; default: that of the system.")
TABLE = flags.DEFINE_bool("table", False, "Only write the table of the sweep in a folder.")
COMMANDS = flags.DEFINE_bool("commands", False, "Only print the commands of runs that are left.")
WORDS: list[str] = []  # the words that are no flags

_OF_PLAN = ("config", "seeds", "set", "samples", "checkpoint")


def main() -> int:
    """Reads the flags, runs what is left of the plan, and shows the table."""
    folders = [*filter(None, [OUT.value, *WORDS])]
    if len(folders) != 1 or (WORDS and not TABLE.value):
        raise InputError(
            "give the sweep's folder once, for example --out=runs/sweep, or --table runs/sweep."
        )
    folder = Path(folders[0])
    plan = _plan(folder)
    if COMMANDS.value:
        for run in plan.runs():
            if missing(run, folder):
                print(" && ".join(map(shlex.join, plan.commands(run, folder).values())))
        return 0
    with writing(folder, "--out"):
        if not TABLE.value:
            try:
                with StopSignal() as stop:
                    run_all(plan, folder, stop)
            except Stopped as stopped:
                print(f"{stopped}: stopped; give the same command to go on.")
                return 128 + signal.Signals[str(stopped)]
        table = scored(plan, folder, SCORE.value)
        text = markdown(plan, table)
        write_whole(folder / "table.md", text)
        write_whole(folder / "table.json", json.dumps(table, indent=2) + "\n")
    print(f"{text}\n{folder / 'table.md'}, {folder / 'table.json'}")
    return int(bool(table["not_scored"]) and not TABLE.value)


def _plan(folder: Path) -> Plan:
    """The plan of the folder; one of the flags begins it, or must be the same."""
    path = folder / "sweep.json"
    kept = Plan(**json.loads(path.read_text())) if path.exists() else None
    if TABLE.value or not any(flags.FLAGS[name].present for name in _OF_PLAN):
        if kept is None:
            raise InputError(
                f"{path} does not exist; give the folder of a sweep, or --config to begin one."
            )
        return kept
    if not CONFIG.value:
        raise InputError("give --config=FILE, too, or only --out to go on with a sweep.")
    seeds, sets = seeds_of(SEEDS.value), sets_of(SET.value)
    plan = Plan(CONFIG.value, seeds, sets, SAMPLES.value, CHECKPOINT.value or "")
    if kept is None:
        plan.check()
        with writing(folder, "--out"):
            write_whole(path, json.dumps(plan._asdict(), indent=2) + "\n")
    elif other := [name for name in plan._fields if getattr(plan, name) != getattr(kept, name)]:
        raise InputError(
            f"{path} has another plan (other {', '.join(other)}); leave the flags out to go on "
            "with it, or give another --out."
        )
    return plan


if __name__ == "__main__":
    commandline.run(main, words=WORDS)
