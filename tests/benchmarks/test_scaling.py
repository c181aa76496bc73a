"""The suite scaling: rings, parts of a step, shared machines, bytes, and the shape of its cases."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from benchmarks import (
    scaling,
    scaling_checks,
    scaling_hosts,
    scaling_links,
    scaling_programs,
    scaling_recipes,
    scaling_tokens,
)
from benchmarks.scaling_answers import Decoding, Sidecar, decode_seconds
from benchmarks.scaling_model import (
    BETWEEN,
    COMPUTE,
    DATA,
    ETHERNET,
    FSDP,
    INFINIBAND,
    INPUT,
    INSIDE,
    PARTS,
    ROLLOUTS,
    SIDECAR,
    SIZES,
    Bytes,
    Compiled,
    Recipe,
    check_devices,
    dollars,
    last_that_pays,
    predict,
    shared,
    split_bytes,
    strong,
    training_hours,
    weak,
)
from benchmarks.scaling_tables import cost_rows, ending, memory_rows, pays_rows, step_rows, steps_of
from qrag_jax.errors import InputError
from qrag_jax.runtime.device_speeds import SPEEDS, Links, Speeds
from qrag_jax.runtime.step_time import Rounds, collective_seconds

H100 = INFINIBAND.of(SPEEDS["h100"])
EACH = (48, 24, 12, 6, 3, 2, 1)
RECIPE = Recipe(
    name="a recipe",
    steps=1000,
    questions=48,
    gradients=4e9,
    question_bytes=1e4,
    loaded=1e6,
    one=Compiled(1, {n: 0.01 + 0.02 * n for n in EACH}, dict.fromkeys(EACH, 0.0), Bytes(40, 0, 20)),
    split=Compiled(
        8, {n: 0.01 + 0.02 * n for n in EACH}, dict.fromkeys(EACH, 0.005), Bytes(5, 0, 6)
    ),
)


def seconds_round_a_ring(devices: int, size: float, speeds: Speeds) -> float:
    """An all-reduce played step by step: as many rings as a host has devices of the group.

    Every device gives `size` bytes, cut into a part for each of them. In 2 (n - 1) steps a device
    sends one part to the next; a step ends when its slowest link has.
    """
    links = speeds.links
    assert links is not None
    parts, total = size / devices, 0.0
    several = devices > links.host
    rings = min(devices, links.host) if several else 1
    for _ in range(2 * (devices - 1)):
        slowest = 0.0
        for device in range(devices):
            there = (device + 1) % devices
            crosses = device // links.host != there // links.host
            # All rings cross at one place here, each through a card of its own.
            speed = links.between * rings if crosses else links.inside
            slowest = max(slowest, parts / speed)
        total += slowest
    return total + (links.between_latency if several else links.inside_latency)


@pytest.mark.parametrize("devices", [2, 4, 8, 16, 64, 256])
@pytest.mark.parametrize("network", [INFINIBAND, ETHERNET])
def test_a_sum_takes_as_long_as_a_ring_played_step_by_step(devices: int, network) -> None:
    speeds = network.of(SPEEDS["h100"])
    found = collective_seconds("all-reduce", 3e9, tuple(range(devices)), speeds)
    played = seconds_round_a_ring(devices, 3e9, speeds)
    assert found == pytest.approx(played, rel=1e-9)
    assert found > 0


def test_one_device_sends_nothing() -> None:
    step = predict(RECIPE, 1, 48, DATA, H100)
    assert step.parts[INSIDE] == step.parts[BETWEEN] == step.parts[SIDECAR] == 0
    assert step.seconds == step.parts[COMPUTE] == RECIPE.one.compute[48]
    assert (step.questions, step.bound) == (48, COMPUTE)
    assert set(step.parts) == set(PARTS)


def test_a_step_of_several_hosts_has_the_sum_between_them() -> None:
    inside, between = predict(RECIPE, 8, 48, DATA, H100), predict(RECIPE, 16, 48, DATA, H100)
    assert inside.parts[BETWEEN] == 0 < inside.parts[INSIDE]
    assert between.parts[INSIDE] == 0 < between.parts[BETWEEN]
    # 8 cards of 50 GB/s are slower than 450 GB/s, but not by much.
    assert between.parts[BETWEEN] == pytest.approx(30e-6 + 2 * 15 / 16 * 4e9 / 400e9)
    split = predict(RECIPE, 16, 48, FSDP, H100)
    # An eighth of the gradients, by one card; the two devices of a group are 8 apart.
    assert split.parts[BETWEEN] == pytest.approx(30e-6 + 2 * 1 / 2 * (4e9 / 8) / 50e9)
    assert split.parts[INSIDE] == 0.005
    assert predict(RECIPE, 8, 48, FSDP, H100).parts[INSIDE] == 0.005


def test_more_devices_never_make_a_weak_step_shorter_nor_a_strong_one_dearer_in_compute() -> None:
    steps = weak(RECIPE, DATA, H100)
    assert [step.devices for step in steps] == [*SIZES]
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(steps))
    assert all(a.rate < b.rate for a, b in itertools.pairwise(steps))
    computed = [step.parts[COMPUTE] for step in strong(RECIPE, DATA, H100)]
    assert computed == sorted(computed, reverse=True)
    assert len(computed) == 6  # 48 questions are fewer than 64 devices
    slower = weak(RECIPE, DATA, ETHERNET.of(SPEEDS["h100"]))
    assert all(a.seconds <= b.seconds for a, b in zip(steps, slower, strict=True))
    assert slower[-1].seconds > steps[-1].seconds


def test_fsdp_is_told_for_whole_programs_alone() -> None:
    assert [step.devices for step in weak(RECIPE, FSDP, H100)] == [8, 16, 32, 64, 128, 256]
    assert weak(dataclasses.replace(RECIPE, split=None), FSDP, H100) == []
    with pytest.raises(InputError, match="no program for FSDP on 4 devices; give a multiple"):
        predict(RECIPE, 4, 48, FSDP, H100)


def test_input_counts_only_where_it_takes_longer() -> None:
    slow = dataclasses.replace(RECIPE, loaded=10.0)
    step = predict(slow, 8, 48, DATA, H100)
    assert step.bound == INPUT
    assert step.seconds == step.parts[INPUT] == pytest.approx(48 * 8 / 10)
    assert predict(slow, 16, 48, DATA, H100).parts[INPUT] == step.parts[INPUT]  # of each host
    fast = predict(RECIPE, 8, 48, DATA, H100)
    assert fast.seconds == pytest.approx(fast.parts[COMPUTE] + fast.parts[INSIDE])


@pytest.mark.parametrize(
    ("devices", "each", "told"),
    [
        (0, 48, "0 devices do not fill hosts of 8; give 1 to 8, or a multiple of 8"),
        (12, 48, "12 devices do not fill hosts of 8"),
        (8, 7, "was not estimated for 7 questions a device; give one of 1, 2, 3, 6, 12, 24, 48"),
    ],
)
def test_what_cannot_be_predicted_is_told_in_a_sentence(devices, each, told) -> None:
    with pytest.raises(InputError, match=told):
        predict(RECIPE, devices, each, DATA, H100)


def test_a_device_without_links_is_refused() -> None:
    alone = Speeds("alone", {"f32": 1.0}, 1.0, 1.0, 0.0)
    with pytest.raises(InputError, match="alone has no links to other devices"):
        INFINIBAND.of(alone)
    check_devices(24, 8)
    assert INFINIBAND.of(SPEEDS["h100"]).links.between == 50e9


def test_a_cluster_stops_to_pay_at_half_of_the_perfect_speed() -> None:
    dear = dataclasses.replace(RECIPE, gradients=400e9)
    steps = steps_of(dear, "strong", DATA, INFINIBAND, SPEEDS["h100"])
    assert steps[0][1] == pytest.approx(1.0)
    last, bound = ending(steps)
    assert last is not None
    assert all(share >= 0.5 for step, share in steps if step.devices <= last.devices)
    behind = [share for step, share in steps if step.devices > last.devices]
    assert behind
    assert behind[0] < 0.5
    assert bound in (INSIDE, BETWEEN)
    cheap = dataclasses.replace(RECIPE, gradients=1.0)
    assert ending(steps_of(cheap, "weak", DATA, INFINIBAND, SPEEDS["h100"]))[1] == ""
    found = [step for step, _ in steps]
    assert last_that_pays(found, found[0]) == last


def test_strong_steps_count_the_batch_and_the_fullest_device() -> None:
    (step,) = [s for s in strong(RECIPE, DATA, H100) if s.devices == 32]
    assert step.questions == 48
    assert step.parts[COMPUTE] == RECIPE.one.compute[2]


def test_bytes_of_other_sizes_go_through_both_programs() -> None:
    one, eight = RECIPE.one.bytes, RECIPE.split.bytes
    assert split_bytes(one, eight, 8, 1) == one
    assert split_bytes(one, eight, 8, 8) == Bytes(*map(pytest.approx, (5, 0, 6)))
    totals = [split_bytes(one, eight, 8, n).total for n in (1, 2, 4, 8, 64)]
    assert totals == sorted(totals, reverse=True)
    whole, split = 0.0, 40.0  # arguments: 40 on one, 5 on eight
    assert split_bytes(one, eight, 8, 4).arguments == pytest.approx(whole + split / 4)
    with pytest.raises(InputError, match="give one for 2 devices or more"):
        split_bytes(one, eight, 1, 4)


def test_processes_share_what_one_can_fill() -> None:
    own = Speeds("a processor", {"f32": 8.0}, 4.0, 2.0, 1e-6)
    assert dataclasses.replace(shared(own, 1, 2), title=own.title) == own
    two, four = shared(own, 2, 2), shared(own, 4, 2)
    assert (two.products["f32"], two.other, two.bandwidth) == (4.0, 2.0, 1.0)
    assert (two.launch, four.launch) == (1e-6, 2e-6)  # four processes take turns on two cores
    with pytest.raises(InputError, match="0 processes on 2 cores cannot run"):
        shared(own, 0, 2)


def test_links_are_told_by_a_ring() -> None:
    links = scaling_links.links_from(4, latency=0.5, seconds=2.5)
    assert links == Links(4, links.inside, links.inside, 0.5, 0.5)
    speeds = Speeds("p", {"f32": 1.0}, 1.0, 1.0, 0.0, links=links)
    size = float(scaling_links.BYTES)
    assert collective_seconds("all-reduce", size, (0, 1, 2, 3), speeds) == pytest.approx(2.5)
    with pytest.raises(InputError, match="tells no speed; give 2 processes or more"):
        scaling_links.links_from(1, 0.5, 2.5)
    with pytest.raises(InputError, match="tells no speed"):
        scaling_links.links_from(2, 2.5, 0.5)


def test_the_derived_step_of_two_processes() -> None:
    parts = {"products": 3.0, "starts of kernels": 1.0}
    step = {"seconds": 4.0, "exposed": 0.0, "parts": parts, "bound": "products"}
    alone = {"programs": {"update": {"steps": {"8": step}}}, "gradients": 100.0}
    alone["loaded"] = 100.0
    own = Speeds("p", {"f32": 1.0}, 1.0, 1.0, 0.0, links=Links(4, 10.0, 10.0, 0.25, 0.25))
    found = scaling_hosts.derived(alone, 8, 4, own, cores=2)
    assert found["compute"] == pytest.approx(3.0 * 4 + 1.0 * 2)
    assert found["collectives"] == pytest.approx(0.25 + 2 * 3 / 4 * 100 / 10)
    assert found["predicted"] == pytest.approx(found["compute"] + found["collectives"])
    assert found["input"] == pytest.approx(8 / 100 * 2)
    assert scaling_hosts.derived(alone, 8, 1, own, cores=2)["predicted"] == pytest.approx(4.0)
    slow = scaling_hosts.derived(alone | {"loaded": 0.1}, 8, 1, own, cores=2)
    assert slow["predicted"] == slow["input"] == pytest.approx(80.0)


def test_a_steady_state_leaves_the_first_line_out() -> None:
    found = scaling_hosts.steady([0.1, 2.0, 4.0, 5.0])
    assert (found["median"], found["fastest"], found["slowest"]) == (0.25, 0.2, 0.5)
    with pytest.raises(InputError, match="a log of 2 line"):
        scaling_hosts.steady([1.0, 2.0])


def test_loops_are_named_as_in_the_program_of_another_batch() -> None:
    course = Rounds(3.0)
    assert scaling_programs.rows_of_program({(60, 128): course}, 6, 48) == {(480, 128): course}
    asked = scaling_programs.Asked("quickstart.py:tiny", {}, (1, 1, 1), "", 4, (4, 2))
    text = scaling_programs.json.dumps(dataclasses.asdict(asked))
    assert scaling_programs.Asked.of(text) == asked
    config = scaling_programs.config_of(dataclasses.replace(asked, mesh=(1, 8, 1)))
    assert (config.train.batch_size, config.train.accumulation) == (32, 1)
    assert config.eval.batch_size % 8 == 0
    with pytest.raises(InputError, match="there is no configs/nothing"):
        scaling_programs.config_of(dataclasses.replace(asked, config="nothing"))
    speeds = SPEEDS["h100"]
    assert scaling_programs.speeds_from(scaling_programs.speeds_json(speeds)) == speeds


def test_answers_are_bound_by_the_bytes_of_each_token() -> None:
    speeds = SPEEDS["h100"]
    decoding = Decoding(parameters=1e9, token_bytes=1e5, tokens=100, before=400)
    slow = sum((2 * 1e9 + 8 * (400 + token + 0.5) * 1e5) / speeds.bandwidth for token in range(100))
    assert decode_seconds(decoding, 8, speeds) == pytest.approx(slow)
    sidecar = Sidecar("a model", 1e9, 1e5, calls=6, prompt=400, answer=100, at_once=8)
    one, ten = sidecar.seconds(4, speeds), sidecar.seconds(40, speeds)
    assert one == pytest.approx(3 * slow + 2e9 * 400 * 24 / 989e12)
    assert ten == pytest.approx(10 * one)
    step = predict(dataclasses.replace(RECIPE, sidecar=sidecar), 8, 48, DATA, H100)
    assert step.parts[SIDECAR] == pytest.approx(sidecar.seconds(48 * 8, speeds))
    assert step.bound == SIDECAR


def test_costs_are_hours_times_devices() -> None:
    step = predict(RECIPE, 8, 48, DATA, H100)
    assert training_hours(step, 3600) == pytest.approx(step.seconds)
    assert dollars(step, 3600, an_hour=2.0) == pytest.approx(step.seconds * 16)


def test_tables_have_a_line_for_each_size() -> None:
    lines = step_rows(RECIPE, INFINIBAND, SPEEDS["h100"])
    assert [line[0] for line in lines[1:]] == [str(size) for size in SIZES]
    assert all(len(line) == 5 for line in lines)
    assert lines[1][2] == lines[1][4] == ""  # no FSDP on one device
    assert lines[-1][3] == ""  # 48 questions on 256 devices
    memory = memory_rows(RECIPE, room=62.0)
    assert [line[0] for line in memory[1:]] == ["1", "2", "4", "8"]
    assert [line[2] for line in memory[1:]] == ["no", "yes", "yes", "yes"]
    assert [line[3] for line in memory[1:]] == ["compiled", "derived", "derived", "compiled"]
    (_, cost) = cost_rows([RECIPE], INFINIBAND, SPEEDS["h100"])
    assert cost[-1] == "more than 48 questions"
    assert len(pays_rows([RECIPE], SPEEDS["h100"])) == 1 + 4


def test_the_cases_of_a_recipe_and_of_a_run() -> None:
    cases = list(scaling.recipe_cases(RECIPE))
    assert len({case.case for case in cases}) == len(cases) == 8
    assert all(case.value is not None and math.isfinite(case.value) for case in cases)
    (step,) = [case for case in cases if case.unit == "ms"]
    assert step.value == pytest.approx(970.0)
    measured = {"median": 0.5, "fastest": 0.4, "slowest": 0.6, "lines": 4.0}
    row = {"processes": 2, "axis": "data", "links": {"latency": 1e-3, "seconds": 0.1}}
    row |= {"predicted": 0.4, "compute": 0.3, "collectives": 0.1, "measured": measured}
    (case,) = scaling.validation_cases([row])
    assert (case.value, case.unit) == (pytest.approx(0.8), "x")
    assert case.holds is None
    split = {key: value for key, value in row.items() if key != "predicted"}
    (case,) = scaling.validation_cases([split | {"from_program": 0.25}])
    assert case.value == pytest.approx(0.5)


def test_recipes_are_published_ones() -> None:
    assert scaling_recipes.questions_each(48) == (48, 24, 12, 6, 3, 2)
    assert scaling_recipes.questions_each(1) == (1,)
    for name in scaling_recipes.RECIPES:
        assert name.removesuffix(scaling_recipes.HALF) in scaling_recipes.published.RUNS
    assert {name for name in scaling_recipes.published.RUNS} <= {*scaling_recipes.RECIPES}
    sidecar = scaling_recipes.sidecar_of("contriever-babilong-em")
    assert sidecar is not None
    assert 1.6e9 < sidecar.parameters < 1.8e9
    assert sidecar.token_bytes == 2 * 2 * 28 * 8 * 128
    assert scaling_recipes.sidecar_of("e5-hotpotqa") is None


def test_zeros_have_the_shapes_of_the_model(tmp_path) -> None:
    from benchmarks.scaling_folders import write_zeros
    from qrag_jax.models.pretrained import load_encoder

    folder = write_zeros("facebook/contriever", tmp_path / "zeros")
    loaded = load_encoder(folder)
    sizes = [leaf.shape for leaf in scaling_recipes.jax.tree.leaves(loaded.stored)]
    assert 1.08e8 < sum(map(math.prod, sizes)) < 1.1e8
    assert (folder / "model.safetensors").stat().st_blocks * 512 < 2**20  # a hole
    with pytest.raises(InputError, match="the sizes of nobody/nothing are not known"):
        write_zeros("nobody/nothing", tmp_path / "other")


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_drawn_weights_are_read_as_a_model(tmp_path, monkeypatch, kind: str) -> None:
    from benchmarks import scaling_folders
    from qrag_jax.models.pretrained import load_encoder

    sizes = {"vocab_size": 40000, "hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512}
    if kind == "qwen3":
        sizes |= {"num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6}
        sizes |= {"rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": True}
    else:
        sizes |= {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
    monkeypatch.setitem(scaling_folders.MODELS, "small", {"model_type": kind, **sizes})
    loaded = load_encoder(scaling_folders.write_drawn("small", tmp_path / "drawn"))
    leaves = scaling_recipes.jax.tree.leaves_with_path(loaded.params)
    for path, leaf in leaves:
        scale = float(abs(leaf).mean())
        assert (
            scale == 1.0 if "norm" in str(path) and "bias" not in str(path) else 0.01 < scale < 0.03
        )


def test_rollouts_of_a_language_model_hardly_shrink_with_the_batch() -> None:
    _, model = scaling_tokens.RECIPES["rlvr-qwen3"]
    assert 1.6e9 < scaling_tokens.weight_count(model) < 1.8e9
    one, eight = (scaling_tokens.rollout_seconds(model, n, SPEEDS["h100"]) for n in (1, 8))
    floor = scaling_tokens.SAMPLED * 2 * scaling_tokens.weight_count(model) / 3.35e12
    assert floor < one < eight < 8 * one
    row = {"arguments": 2.0, "outputs": 0.0, "temporaries": 1.0, "estimate": {"seconds": 0.25}}
    result = {"name": "rlvr-qwen3", "steps": 10, "questions": 8, "one": row, "split": row}
    recipe = scaling_tokens.tokens_recipe(result, scaling_recipes.questions_each(8))
    step = predict(recipe, 8, 1, DATA, H100)
    assert (step.parts[COMPUTE], step.parts[ROLLOUTS]) == (0.25, pytest.approx(one))
    assert step.parts[INPUT] == 0
    # 7 maps of 28 layers in rank 16; a sixteenth of this number is the sum of their sides.
    sides = 2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144)
    assert recipe.gradients == 4 * 16 * 28 * sides


def test_derived_steps_stand_beside_compiled_ones() -> None:
    step = predict(RECIPE, 16, 6, FSDP, H100)
    row = {"each": 6, "arguments": 2**30, "outputs": 0, "temporaries": 2**30}
    row |= {"steps": {"6": {"seconds": step.seconds / 2}}}
    _, line = scaling_checks.check_rows({"rows": {"2x8x1": row}}, RECIPE)
    assert (line[0], line[1], line[4], line[5]) == ("2x8x1", "6", "2.00", "2.0")
    assert scaling_checks.RECIPE in scaling_recipes.RECIPES


def test_a_measured_training_is_predicted_for_machines_like_this_one() -> None:
    step = {"seconds": 4.0, "exposed": 0.0, "parts": {}, "bound": "memory"}
    update = {"steps": {"8": step}, "arguments": 1.0, "outputs": 0.0, "temporaries": 1.0}
    alone = {"programs": {"update": update}, "gradients": 1e3, "question_bytes": 1.0}
    recipe = scaling.small_recipe(alone | {"loaded": 1e3}, scaling_hosts.QUICK)
    own = Speeds("p", {"f32": 1.0}, 1.0, 1.0, 0.0)
    here = scaling.joined_machines(own, 2, {"latency": 0.5, "seconds": 2.5})
    assert here.links is not None
    assert here.links.host == 1
    steps = weak(recipe, DATA, here)
    assert [step.devices for step in steps] == [*SIZES]
    assert steps[0].seconds == 4.0
    assert steps[1].parts[BETWEEN] == pytest.approx(0.5 + 1e3 / here.links.between)
