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

import signal
from pathlib import Path

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline, locks
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems import sweep_plan
from qrag_jax.systems.sweep_plan import NAME, Plan, missing, run_all, seeds_of, sets_of

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
    folder = _folder()
    if TABLE.value:
        with commandline.writing(folder, "--table"):
            print(_table(Plan.read(folder), folder), end="")
        return 0
    plan = _plan(folder)
    if COMMANDS.value:
        for run in plan.runs():
            if missing(run, folder):
                print(plan.line(run, folder))
        return 0
    return _run(folder, plan)


def _folder() -> Path:
    given = [*filter(None, [OUT.value, *WORDS])]
    if len(given) != 1 or (WORDS and not TABLE.value):
        raise InputError(
            "give the sweep's folder once, for example --out=runs/sweep, or --table runs/sweep."
        )
    return Path(given[0])


def _plan(folder: Path) -> Plan:
    """The plan of the flags, checked and kept, or that of the folder where they give none."""
    given = [name for name in _OF_PLAN if flags.FLAGS[name].present]
    if not given:
        return Plan.read(folder)
    if not CONFIG.value:
        raise InputError(
            f"--{given[0]} is given without --config; give --config=FILE, too, or only --out to go "
            "on with the plan of that folder."
        )
    plan = Plan(
        CONFIG.value,
        seeds_of(SEEDS.value),
        sets_of(SET.value),
        SAMPLES.value,
        CHECKPOINT.value or "",
    )
    if not (folder / NAME).exists():
        plan.check()
    with commandline.writing(folder, "--out"):
        if (folder / NAME).exists():
            plan.refuse_other(Plan.read(folder), folder)
        else:
            plan.write(folder)
    return plan


def _run(folder: Path, plan: Plan) -> int:
    fix = "wait until it ends, or end it, or give another --out"
    lock = folder / ".sweep.lock", f"{folder} is being run", fix, "--out"
    try:
        with commandline.writing(folder, "--out"), locks.held(*lock), StopSignal() as stop:
            run_all(plan, folder, stop)
    except Stopped as stopped:
        runs = plan.runs()
        done = sum(not missing(run, folder) for run in runs)
        print(
            f"{stopped}: stopped, {done} of {len(runs)} runs are done; give the same command to "
            "go on."
        )
        return 128 + signal.Signals[str(stopped)]
    with commandline.writing(folder, "--out"):
        print(_table(plan, folder), end="")
    return int(any(missing(run, folder) for run in plan.runs()))


def _table(plan: Plan, folder: Path) -> str:
    found = sweep_plan.scored(plan, folder, SCORE.value)
    text = sweep_plan.write(folder, plan, sweep_plan.compared(found))
    return f"{text}\n{folder / sweep_plan.MARKDOWN}, {folder / sweep_plan.JSON}\n"


if __name__ == "__main__":
    commandline.run(main, words=WORDS)
