"""Which collectives every device of a group is sure to reach: small programs of this machine."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.same_course import different_courses
from qrag_jax.runtime.mesh import AXES
from tests.devices import mesh_of
from tests.support.hlo import collectives

MESH = mesh_of(2, 2, 2)
SPLIT, COPIED = PartitionSpec(AXES), PartitionSpec()


def text_of(on_device: Callable[..., jax.Array]) -> str:
    """The program of `on_device(own, same)` on a mesh of 2 × 2 × 2 devices, which sends something.

    own: this device's 4 of 32 numbers; same: a whole number, equal everywhere.
    """
    over_mesh = jax.shard_map(
        on_device, mesh=MESH, in_specs=(SPLIT, COPIED), out_specs=SPLIT, check_vma=False
    )
    text = jax.jit(over_mesh).lower(np.ones(32, np.float32), np.int32(3)).compile().as_text()
    assert collectives(text)
    return text


def gathered(own, names=AXES):
    return jax.lax.all_gather(own, names, tiled=True)


def count(numbers):
    return (numbers > 0.5).sum(dtype=jnp.int32)


def sums(rounds, own, names=AXES):
    """As many sums over devices as `rounds` says."""

    def one(at):
        number, numbers = at
        return number + 1, jnp.sin(jax.lax.psum(numbers, names))

    return jax.lax.while_loop(lambda at: at[0] < rounds, one, (jnp.int32(0), own))[1]


def one_branch(way, own):
    return jax.lax.cond(way, lambda x: jax.lax.psum(x, AXES), jnp.sin, own)


def local_rounds(own, more):
    """A loop of a device's own, which counts its rounds and gives on `more`."""

    def one(at):
        number, numbers, more = at
        return number + 1, numbers * 0.9, more

    start = jnp.int32(0), own, more
    number, _, more = jax.lax.while_loop(lambda at: at[1].sum() > 0.5, one, start)
    return number, more


def grows(own, by):
    """A loop until a number, which begins as a constant, is large; each round adds `by(own)`."""

    def one(total):
        return total + jnp.abs(jax.lax.psum(own + total, AXES)).sum() + by(own)

    return own + jax.lax.while_loop(lambda total: total < 9, one, jnp.float32(0))


def inner_branch(own, numbers):
    """A loop that all devices run equally often, with a branch inside."""

    def one(at):
        number, x = at
        return number + 1, one_branch(numbers(x).sum() > 1, x)

    return jax.lax.while_loop(lambda at: at[0] < 5, one, (jnp.int32(0), own))[1]


SAFE = {
    "rounds from gathered numbers": lambda own, same: sums(count(gathered(own)), own),
    "rounds from a sum": lambda own, same: sums(count(jax.lax.psum(own, AXES)), own),
    "rounds from an unsplit input": lambda own, same: sums(same, own),
    "gathered over the axes one by one": lambda own, same: sums(
        count(gathered(gathered(gathered(own, "tensor"), "fsdp"), "data")), own
    ),
    "rounds equal inside the group": lambda own, same: sums(
        count(gathered(own, "fsdp")), own, "fsdp"
    ),
    "a branch for all": lambda own, same: one_branch(same > 2, own),
    "a branch in a loop": lambda own, same: inner_branch(own, gathered),
    "a carried value that stays equal": lambda own, same: grows(own, lambda x: count(gathered(x))),
    "past a loop of the device's own": lambda own, same: sums(
        local_rounds(own, count(gathered(own)))[1], own
    ),
    "outside": lambda own, same: jnp.sin(jax.lax.psum(own, AXES)),
    "rounds that are counted": lambda own, same: sums(7, own),
}
UNSAFE = {
    "rounds from the device's own numbers": lambda own, same: sums(count(own), own),
    "rounds equal in a smaller group": lambda own, same: sums(count(gathered(own, "fsdp")), own),
    "rounds equal in another group": lambda own, same: sums(
        count(gathered(own, "fsdp")), own, "tensor"
    ),
    "rounds from the device's number": lambda own, same: sums(
        same + jax.lax.axis_index("fsdp"), own
    ),
    "rounds from scattered sums": lambda own, same: sums(
        count(jax.lax.psum_scatter(gathered(own), AXES, tiled=True)), own
    ),
    "rounds from a neighbour": lambda own, same: sums(
        count(jax.lax.ppermute(own, "fsdp", [(0, 1), (1, 0)])), own
    ),
    "a branch of the device's own": lambda own, same: one_branch(own.sum() > 1, own),
    "a branch in a loop": lambda own, same: inner_branch(own, lambda x: x),
    "a carried value that does not stay equal": lambda own, same: grows(own, count),
    "how often a loop of the device's own ran": lambda own, same: sums(
        local_rounds(own, same)[0], own
    ),
    "what a branch of the device's own chose": lambda own, same: sums(
        jax.lax.cond(own.sum() > 1, lambda: same, lambda: same + 1), own
    ),
}


@pytest.mark.parametrize("case", SAFE)
def test_what_all_devices_reach_is_accepted(case: str) -> None:
    assert different_courses(text_of(SAFE[case])) == []


@pytest.mark.parametrize("case", UNSAFE)
def test_what_a_device_may_not_reach_is_refused(case: str) -> None:
    assert different_courses(text_of(UNSAFE[case]))


# Groups over the middle axis, and over others or unknown ones.
MIDDLE = (
    "{{0,2},{1,3},{4,6},{5,7}}",
    "[4,2]<=[2,2,2]T(0,2,1)",
    "mesh['a'=2,'b'=2,'c'=2] {'b'}",
    "mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}",
)
OTHERS = (
    "{{0,1},{2,3},{4,5},{6,7}}",
    "{}",
    "[4,2]<=[8]",
    "mesh['a'=2,'b'=2,'c'=2] {'c'}",
    "mesh['a'=2,'b'=2,'c'=2] {'b','c'}",
    "mesh['a'=2,'b'=4] {'a'}",
    "mesh['a'=8] {'a':(2)2}",
    "@unknown",
)


@pytest.mark.parametrize("groups", [*MIDDLE, *OTHERS])
def test_groups_are_read_in_each_form_of_hlo(groups: str) -> None:
    """The sum in a loop whose rounds were gathered over the middle axis gets these groups."""
    text = text_of(SAFE["rounds equal inside the group"])
    listed = f"replica_groups={MIDDLE[0]}"
    changed = "\n".join(
        line.replace(listed, f"replica_groups={groups}") if " all-reduce(" in line else line
        for line in text.splitlines()
    )
    assert f"replica_groups={groups}" in changed
    assert bool(different_courses(changed)) == (groups in OTHERS)


@pytest.mark.parametrize(
    ("sharding", "accepted"),
    [
        ("devices=[8]<=[8]", False),
        ("devices=[8]0,1,2,3,4,5,6,7", False),
        ("devices=[4,2]<=[8] last_tile_dim_replicate", False),
        ("devices=[1,8]<=[8] last_tile_dims={manual}", False),
        ("devices=[1,8]<=[8] last_tile_dim_replicate", True),
        ("replicated", True),
        ("manual", False),
        (None, False),
    ],
)
def test_shardings_of_inputs_are_read_in_each_form_of_hlo(sharding, accepted) -> None:
    text = text_of(UNSAFE["rounds from the device's own numbers"])
    written = "sharding={devices=[8]<=[8]}, "
    assert written in text
    said = "" if sharding is None else f"sharding={{{sharding}}}, "
    assert bool(different_courses(text.replace(written, said))) != accepted


def test_replicas_are_not_understood() -> None:
    text = text_of(SAFE["outside"]).replace(
        "num_partitions=", "replica_count=2, num_partitions=", 1
    )
    with pytest.raises(ValueError, match="replicas"):
        different_courses(text)
