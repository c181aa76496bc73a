"""Predicts step time, memory and cost of a training on 1 to 256 GPUs, from compiled programs.

The step of each published recipe is compiled for one H100 and for eight that are not here (`make
gpu`). The published speeds of links and the measured speed of the input tell the rest; memory and
steps of other sizes are derived from these two programs (`scaling_model`). The same model is put
beside real trainings of 1, 2 and 4 processes on this machine, with the speeds measured here.

Results are kept by version of the code, so an interrupted suite resumes, and `--only=PART` runs one
part: `hosts-2`, a recipe, or `checks`. `--quick` puts a small training of 2 processes beside the
model, and predicts it for clusters of machines like this one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import report, scaling_checks, scaling_hosts, scaling_tables, scaling_tokens
from benchmarks.kept_runs import Kept, Part
from benchmarks.own_speeds import own_speeds
from benchmarks.report import Case, print_table
from benchmarks.scaling_checks import check_rows, compile_checks
from benchmarks.scaling_hosts import FULL, QUICK, Setting, validated
from benchmarks.scaling_links import links_from
from benchmarks.scaling_model import (
    DATA,
    DOLLARS_AN_HOUR,
    INFINIBAND,
    NETWORKS,
    Recipe,
    dollars,
    weak,
)
from benchmarks.scaling_recipes import (
    RECIPES,
    compile_recipe,
    compiled_of,
    questions_each,
    recipe_of,
)
from benchmarks.scaling_tables import GIB, KINDS, ending, steps_of
from benchmarks.scaling_tokens import compile_tokens, tokens_recipe
from qrag_jax.runtime.device_speeds import SPEEDS, Speeds
from qrag_jax.runtime.targets import TARGETS

GPU, HOSTS, CHECKS = "h100", "hosts", "checks"
PREDICTED = {  # of a run's row, and how it is told
    "predicted": "predicted step",
    "compute": "predicted compute",
    "collectives": "predicted sum of gradients",
    "input": "predicted input",
    "from_program": "predicted by the program for all processes",
    "exposed": "its wait for collectives",
}


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: `only` names an unknown part, or a program cannot be compiled here.
    """
    if quick:
        return _quick_cases()
    kept = Kept.of("scaling")
    parts: dict[str, Part] = {
        f"{HOSTS}-{processes}": partial(measure_hosts, FULL, processes)
        for processes in FULL.processes
    }
    parts |= {name: partial(compile_recipe, name, kept.runs / "encoders") for name in RECIPES}
    parts |= {name: partial(compile_tokens, name) for name in scaling_tokens.RECIPES}
    parts[CHECKS] = partial(compile_checks, kept.runs / "encoders")
    results = kept.finish(parts, only)
    recipes = [recipe_of(results[name]) for name in RECIPES if name in results]
    recipes += [
        tokens_recipe(results[name], questions_each(results[name]["questions"]))
        for name in scaling_tokens.RECIPES
        if name in results
    ]
    measured = [results[name]["rows"] for name in results if name.startswith(HOSTS)]
    rows = [row for found in measured for row in found]
    tables = list(_tables(rows, recipes))
    checked = [recipe for recipe in recipes if recipe.name == scaling_checks.RECIPE]
    if CHECKS in results and checked:
        lines = check_rows(results[CHECKS], checked[0])
        tables.append((f"{checked[0].name}: derived steps beside compiled ones", lines))
    for title, lines in tables:
        print(f"\n{title}")
        print_table(lines)
    written = [f"{title}\n\n{report.markdown(lines[0], lines[1:])}" for title, lines in tables]
    kept.write_tables(results, f"At ${DOLLARS_AN_HOUR:g} an H100 an hour, an assumption.", written)
    return [*validation_cases(rows), *(case for each in recipes for case in recipe_cases(each))]


def measure_hosts(setting: Setting, processes: int) -> dict[str, Any]:
    """Real trainings in so many processes, and what the model says of them; as JSON.

    The machine's speeds are measured right before.
    """
    found = validated(setting, processes, own_speeds(), _cores())
    return found | {"cores": _cores()}


def validation_cases(rows: Sequence[Mapping[str, Any]]) -> list[Case]:
    """How much of the measured time of each run was predicted; without a target."""
    cases = []
    for row in rows:
        seconds = row["measured"]["median"]
        details = {
            "measured (median), ms": seconds * 1e3,
            "measured (fastest), ms": row["measured"]["fastest"] * 1e3,
            "measured (slowest), ms": row["measured"]["slowest"] * 1e3,
            **{f"{title}, ms": row[name] * 1e3 for name, title in PREDICTED.items() if name in row},
            **{f"Gloo's all-reduce, {k}, ms": s * 1e3 for k, s in row["links"].items()},
        }
        found = row["predicted"] if "predicted" in row else row["from_program"]
        cases.append(
            Case(
                f"{row['processes']} process(es) along {row['axis']}: predicted over measured step",
                found / seconds,
                "x",
                details=details,
            )
        )
    return cases


def recipe_cases(recipe: Recipe) -> Iterator[Case]:
    """What is predicted of a recipe on H100s; no figure is measured on a GPU."""
    speeds = INFINIBAND.of(SPEEDS[GPU])
    (first,) = weak(recipe, DATA, speeds, (1,))
    yield Case(f"{recipe.name}: memory on one {GPU}", recipe.one.bytes.total / GIB, "GiB")
    if recipe.split is not None:
        yield Case(
            f"{recipe.name}: memory on {recipe.split.devices} along fsdp",
            recipe.split.bytes.total / GIB,
            "GiB of each",
        )
    yield Case(
        f"{recipe.name}: step on one {GPU}",
        first.seconds * 1e3,
        "ms",
        details={f"{name}, ms": seconds * 1e3 for name, seconds in first.parts.items()},
    )
    yield Case(f"{recipe.name}: training on one {GPU}", dollars(first, recipe.steps), "dollars")
    for kind in KINDS:
        for network in NETWORKS:
            steps = steps_of(recipe, kind, DATA, network, SPEEDS[GPU])
            last, ended = ending(steps)
            yield Case(
                f"{recipe.name}, {kind}, {network.title}: pays up to",
                float(last.devices if last else 0),
                "GPUs",
                details={
                    **{f"{step.devices} GPUs: ms": step.seconds * 1e3 for step, _ in steps},
                    **{f"{step.devices} GPUs: efficiency": share for step, share in steps},
                    "then bound by": ended or "none of these sizes",
                },
            )


def _tables(
    rows: Sequence[Mapping[str, Any]], recipes: Sequence[Recipe]
) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    if rows:
        yield "Real runs of this machine beside the model", scaling_tables.validation_rows(rows)
    for recipe in recipes:
        for network in NETWORKS:
            yield (
                f"{recipe.name}, {recipe.questions} questions, {network.title}",
                scaling_tables.step_rows(recipe, network, SPEEDS[GPU]),
            )
        yield (
            f"{recipe.name}: memory",
            scaling_tables.memory_rows(recipe, TARGETS[GPU].memory),
        )
    if recipes:
        yield "Where it stops to pay", scaling_tables.pays_rows(recipes, SPEEDS[GPU])
        yield (
            f"Cost of the published batch, {INFINIBAND.title}",
            scaling_tables.cost_rows(recipes, INFINIBAND, SPEEDS[GPU]),
        )


def _quick_cases() -> list[Case]:
    """The small training beside the model, and the model for clusters of machines like this one."""
    speeds = own_speeds()
    (processes,) = QUICK.processes
    found = validated(QUICK, processes, speeds, _cores())
    rows = found["rows"]
    recipe = small_recipe(found["alone"], QUICK)
    here = joined_machines(speeds, processes, rows[0]["links"])
    steps = weak(recipe, DATA, here)
    print_table(scaling_tables.validation_rows(rows))
    share = steps[0].seconds / steps[-1].seconds
    return [
        *validation_cases(rows),
        Case(
            f"{steps[-1].devices} machines like this one, weak: predicted efficiency",
            share,
            "",
            details={f"{step.devices}: step, ms": step.seconds * 1e3 for step in steps},
        ),
    ]


def small_recipe(alone: Mapping[str, Any], setting: Setting) -> Recipe:
    """The measured training as a recipe, with the part of its batch that a process has."""
    return Recipe(
        name=scaling_hosts.CONFIG,
        steps=setting.steps,
        questions=setting.batch // setting.processes[-1],
        gradients=alone["gradients"],
        question_bytes=alone["question_bytes"],
        loaded=alone["loaded"],
        one=compiled_of(alone, 1),
    )


def joined_machines(speeds: Speeds, processes: int, links: Mapping[str, float]) -> Speeds:
    """Machines like this one, a process on each, that reach each other as its processes do."""
    measured = dataclasses.replace(links_from(processes, **links), host=1)
    return dataclasses.replace(speeds, links=measured)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
