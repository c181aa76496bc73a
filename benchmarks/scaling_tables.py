"""The tables of the suite `scaling`: steps by size, memory, what a cluster costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scaling_model import (
    DATA,
    DOLLARS_AN_HOUR,
    FSDP,
    INPUT,
    NETWORKS,
    PARTS,
    SIZES,
    Network,
    Recipe,
    Step,
    dollars,
    efficiencies,
    last_that_pays,
    split_bytes,
    strong,
    training_hours,
    weak,
)
from qrag_jax.runtime.device_speeds import Speeds
from qrag_jax.runtime.dry_run import MEMORY_SHARE

GIB = 2**30
WEAK, STRONG = "weak", "strong"
KINDS = {WEAK: weak, STRONG: strong}
MEMORY_SIZES = (1, 2, 4, 8)  # along fsdp, in one host
COST_SIZES = (1, 8, 16, 64)


def steps_of(
    recipe: Recipe, kind: str, how: str, network: Network, speeds: Speeds
) -> list[tuple[Step, float]]:
    """Steps by size, each with its efficiency; that of one device is 1.

    A recipe that one device cannot hold is compared with one device all the same: its program says
    how long that would take.
    """
    joined = network.of(speeds)
    (first,) = weak(recipe, DATA, joined, (1,))
    found = KINDS[kind](recipe, how, joined)
    return list(zip(found, efficiencies(found, first), strict=True))


def step_rows(recipe: Recipe, network: Network, speeds: Speeds) -> list[tuple[str, ...]]:
    """A line for each size: weak and strong, data parallel and FSDP; "" where there is none."""
    found = {
        (kind, how): {
            step.devices: (step, share)
            for step, share in steps_of(recipe, kind, how, network, speeds)
        }
        for kind in KINDS
        for how in (DATA, FSDP)
    }
    header = ("GPUs", *(f"{kind}, {how}: ms, efficiency, bound" for kind, how in found))
    return [
        header,
        *((str(size), *(_cell(column.get(size)) for column in found.values())) for size in SIZES),
    ]


def _cell(found: tuple[Step, float] | None) -> str:
    if found is None:
        return ""
    step, share = found
    return f"{step.seconds * 1e3:,.4g}, {share:.0%}, {step.bound}"


def memory_rows(recipe: Recipe, room: float) -> list[tuple[str, ...]]:
    """A line for each number of devices that share the parameters: GiB of each, and who says so.

    Args:
        room: bytes of a device.
    """
    lines: list[tuple[str, ...]] = [("GPUs along fsdp", "GiB of each", "fits", "from")]
    for size in MEMORY_SIZES:
        if size == 1:
            held, source = recipe.one.bytes, "compiled"
        elif recipe.split is None:
            continue
        elif size == recipe.split.devices:
            held, source = recipe.split.bytes, "compiled"
        else:
            held = split_bytes(recipe.one.bytes, recipe.split.bytes, recipe.split.devices, size)
            source = "derived"
        fits = "yes" if held.total <= MEMORY_SHARE * room else "no"
        lines.append((str(size), f"{held.total / GIB:.1f}", fits, source))
    return lines


def cost_rows(recipes: Sequence[Recipe], network: Network, speeds: Speeds) -> list[tuple[str, ...]]:
    """A line for each recipe: hours and dollars of the published batch on several clusters."""
    joined = network.of(speeds)
    lines = [
        (
            "recipe",
            *(f"{size} GPUs, ${size * DOLLARS_AN_HOUR:g} an hour: h, $" for size in COST_SIZES),
        )
    ]
    for recipe in recipes:
        steps = {step.devices: step for step in strong(recipe, DATA, joined, COST_SIZES)}
        cells = [
            f"{training_hours(steps[size], recipe.steps):.2g}, "
            f"{dollars(steps[size], recipe.steps):,.3g}"
            if size in steps
            else f"more than {recipe.questions} questions"
            for size in COST_SIZES
        ]
        lines.append((recipe.name, *cells))
    return lines


def pays_rows(recipes: Sequence[Recipe], speeds: Speeds) -> list[tuple[str, ...]]:
    """A line for each recipe and network: the largest cluster that pays, and what ends it."""
    lines: list[tuple[str, ...]] = [("recipe", "network", "batch", "pays up to", "then bound by")]
    for recipe in recipes:
        for network in NETWORKS:
            for kind in KINDS:
                steps = steps_of(recipe, kind, DATA, network, speeds)
                last, ended = ending(steps)
                lines.append(
                    (recipe.name, network.title, kind, f"{last.devices if last else 0}", ended)
                )
    return lines


def ending(steps: Sequence[tuple[Step, float]]) -> tuple[Step | None, str]:
    """The last step that pays, and the part that ends it: input, or that which grew most.

    The part is "" if all pay.
    """
    found = [step for step, _ in steps]
    last = last_that_pays(found, found[0])
    behind = [step for step in found if last is None or step.devices > last.devices]
    if not behind:
        return last, ""
    first, after = found[0], behind[0]
    if after.bound == INPUT:
        return last, INPUT
    # A perfect step of the strong kind would take a share of each part of the first one.
    ideal = after.questions / after.devices / (first.questions / first.devices)
    on_device = [part for part in PARTS if part != INPUT]
    return last, max(on_device, key=lambda part: after.parts[part] - ideal * first.parts[part])


def validation_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each real run of this machine."""
    lines: list[tuple[str, ...]] = [
        (
            *("processes", "along", "measured, ms (fastest to slowest)", "predicted, ms"),
            *("predicted / measured", "from the program of all, ms"),
        )
    ]
    for row in rows:
        found, predicted = row["measured"], row.get("predicted")
        spread = f"{found['fastest'] * 1e3:.4g} to {found['slowest'] * 1e3:.4g}"
        lines.append(
            (
                str(row["processes"]),
                row["axis"],
                f"{found['median'] * 1e3:.4g} ({spread})",
                "" if predicted is None else f"{predicted * 1e3:.4g}",
                "" if predicted is None else f"{predicted / found['median']:.2f}",
                f"{row['from_program'] * 1e3:.4g}" if "from_program" in row else "",
            )
        )
    return lines
