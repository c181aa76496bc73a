"""The suite gpu: its rows, what counts as a fault, and what becomes of rows that fail."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import float32, gpu
from benchmarks.gpu import cases_of
from benchmarks.gpu_faults import faults
from benchmarks.gpu_programs import NAMES
from benchmarks.gpu_query import ALGORITHMS, STATE_TOKENS, state_lengths
from benchmarks.gpu_rows import chosen, rows
from benchmarks.gpu_search import SEARCH
from benchmarks.gpu_tokens import PROGRAMS, SAMPLING, SHAPE, TOKENS, arrays_of_logits, tokens_cases
from benchmarks.report import Case
from benchmarks.schedule import Launches
from qrag_jax.errors import InputError
from qrag_jax.runtime.targets import TARGETS
from tests.support.hlo import Product

ROW: dict[str, Any] = {
    "name": "h100/Qwen3-Embedding-4B/lora/1x8x1/update",
    "target": "h100",
    "platform": "cuda",
    "model": "Qwen3-Embedding-4B",
    "lora": True,
    "mesh": [1, 8, 1],
    "program": "update",
    "layers": 2,
    "learns": True,
    "lowered_s": 1.0,
    "compiled_s": 2.0,
    "lines": 100,
    "arguments": 10 * 2**30,
    "outputs": 0,
    "temporaries": 3 * 2**30,
    "attention_forward": 6,
    "attention_backward": 2,
    "attention_unfused": 0,
    "float32_products": [],
    "float32_unnamed": [],
    "asks_host": [],
    "sends_inside_branches": [],
    "nondeterministic": [],
    "donated": 9,
    "state_arrays": 10,
    "sends": ["all-reduce"],
    "sends_total": 4,
    "sends_hidden": 3,
    "sends_behind_products": 1,
    "sends_bytes": 200,
    "sends_hidden_bytes": 50,
    "kernels": 7,
    "launches": 9,
    "host_loops": 1,
    "host_branches": 0,
    "cost": {},
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_backward": 1}, "1 fused gradients for 2 layers"),
        ({"attention_forward": 0}, "0 fused attentions for 2 layers"),
        ({"attention_unfused": 4}, "4 products of attention that is not fused"),
        ({"float32_unnamed": ["a = b × c, f"]}, "a product of float32: a = b × c, f"),
        ({"asks_host": ["send.3"]}, "waits for the host in send.3"),
        ({"sends_inside_branches": ["all-gather.1"]}, "sends where a device may not come: all-ga"),
        ({"nondeterministic": ["scatter.4"]}, "adds in no fixed order in scatter.4"),
        ({"donated": 3}, "3 of 10 arrays of the state are reused"),
        ({"many_scores": True, "largest_scores": 0.5}, "holds 50% of a batch's scores at once"),
        ({"failed": "XlaRuntimeError: no"}, "does not compile: XlaRuntimeError: no"),
    ],
)
def test_faults_are_named(change: dict[str, Any], named: str) -> None:
    assert faults(ROW) == []
    (fault,) = faults(ROW | change)
    assert fault.startswith(named)


def test_what_is_not_asked_of_a_program_is_no_fault() -> None:
    plays = {"program": "play", "learns": False, "attention_backward": 0}
    assert faults(ROW | plays | {"donated": 0, "state_arrays": 0}) == []
    on_tpu = {"platform": "tpu", "attention_forward": 0, "attention_backward": 0}
    assert faults(ROW | on_tpu | {"attention_unfused": 9, "nondeterministic": ["add.1"]}) == []
    lowered = {key: value for key, value in ROW.items() if key != "sends_inside_branches"}
    assert faults(lowered) == []


def test_targets_are_held_or_missed() -> None:
    memory, compiling, kernels, wrong = cases_of(ROW)
    assert (memory.value, memory.target, memory.holds) == (13.0, "at most 12", False)
    assert (compiling.value, compiling.holds) == (3.0, None)
    assert (kernels.value, kernels.details["share of their bytes"]) == (7, 0.25)
    assert (wrong.value, wrong.holds) == (0, True)
    smaller, *_ = cases_of(ROW | {"temporaries": 2**30})
    assert smaller.holds
    other, *_ = cases_of(ROW | {"program": "learn"})
    assert other.target is None
    alone = {"sends": [], "sends_total": 0, "sends_bytes": 0, "sends_hidden_bytes": 0}
    assert "share of their bytes" not in cases_of(ROW | alone)[2].details


def test_an_update_of_a_query_encoder_has_a_least_share_of_the_peak() -> None:
    estimate = {"seconds": 1.0, "share_of_peak": 0.39, "bound": "memory", "lines": []}
    found = cases_of(ROW | {"program": "grpo", "estimate": estimate})
    (share,) = [case for case in found if "share of peak" in case.case]
    assert (share.value, share.holds) == (0.39, False)
    small = cases_of(ROW | {"program": "ppo", "model": "BERT-base", "estimate": estimate})
    assert [case.holds for case in small if "share of peak" in case.case] == [None]
    lengths = state_lengths(80, STATE_TOKENS)
    assert 250 < lengths.mean() < 350
    assert lengths.max() <= STATE_TOKENS


def test_a_failed_row_is_one_fault_and_has_no_figures() -> None:
    (case,) = cases_of({"name": "h100/tiny/full/1x1x1/play", "failed": "out of memory"})
    assert (case.value, case.holds) == (1, False)


def test_rows_have_names_of_their_own_and_cover_the_programs() -> None:
    every = rows(quick=False)
    assert len({row.name for row in every}) == len(every)
    gpus = [row for row in every if row.target == "h100"]
    assert {row.program for row in gpus} == {*NAMES, *ALGORITHMS, SEARCH, *PROGRAMS}
    assert {row.devices for row in gpus} == {"h100x1", "h100x8", "h100x64"}
    assert {row.target for row in every} == set(TARGETS)
    assert (
        len({(row.model.name, row.lora) for row in gpus if row.program not in (SEARCH, *PROGRAMS)})
        == 13
    )


def test_rows_are_chosen_by_regular_expressions() -> None:
    every = rows(quick=False)
    found = chosen(every, ["4B/lora/1x8x1/(play|learn)$", "^v5e/"])
    assert [row.name for row in found] == [
        "h100/Qwen3-Embedding-4B/lora/1x8x1/play",
        "h100/Qwen3-Embedding-4B/lora/1x8x1/learn",
        "v5e/BERT-base/full/1x8x1/update",
    ]
    assert chosen(every, []) == every
    with pytest.raises(InputError, match="which no row has; their names are such as h100/BERT"):
        chosen(every, ["a100"])
    with pytest.raises(InputError, match="no regular expression"):
        chosen(every, ["("])


# Prints the rows of its arguments as `gpu_cases` does; dies at "play", refuses "scores".
CHILD = """
import json, os, sys
for name in sys.argv[1:]:
    if name.endswith("/play"):
        os.kill(os.getpid(), 9)
    if name.endswith("/scores"):
        print("error: no packages", file=sys.stderr)
        sys.exit(2)
    print(json.dumps({"name": name}), flush=True)
    print("noise" * 50_000, file=sys.stderr)
"""


def test_a_compiler_that_dies_is_a_row_and_the_next_rows_follow() -> None:
    wanted = chosen(rows(quick=True), ["tiny.*(update|play|learn|texts)"])
    assert [row.program for row in wanted] == ["update", "play", "learn", "texts"]
    found = list(gpu._measured([sys.executable, "-c", CHILD], wanted))
    assert [row["name"] for row in found] == [row.name for row in wanted]
    assert [row.get("failed", "")[:36] for row in found] == [
        "",
        "the compiler ended with status -9: n",
        "",
        "",
    ]


def test_missing_packages_are_told_in_one_sentence() -> None:
    wanted = chosen(rows(quick=True), ["scores"])
    with pytest.raises(InputError, match=r"^no packages$"):
        list(gpu._measured([sys.executable, "-c", CHILD], wanted))


@pytest.mark.parametrize("quick", [True, False])
def test_where_nothing_compiles_the_quick_rows_are_lowered(quick, monkeypatch, capsys) -> None:
    def followed(module: str, wanted: Any) -> list[dict[str, Any]]:
        if module == "benchmarks.gpu_cases":
            raise InputError("no packages.")
        assert module == "benchmarks.lowered"
        return [{"name": row.name, "failed": "lowered"} for row in wanted]

    monkeypatch.setattr(gpu, "_followed", followed)
    if quick:
        assert len(gpu.run(quick, ["scores"])) == 1
        assert "no packages. Programs are lowered instead" in capsys.readouterr().out
        return
    for only in ("BERT-base/full/1x1x1/scores", "BERT-base/full/1x1x1/scores|v5e", "v5e", "^v"):
        with pytest.raises(InputError, match="no packages"):
            gpu.run(quick, [only])


def test_without_libtpu_the_rows_of_tpus_are_left_out(monkeypatch, capsys) -> None:
    def followed(module: str, wanted: Any) -> list[dict[str, Any]]:
        if wanted[0].platform == "tpu":
            raise InputError("no libtpu.")
        return [{"name": row.name, "failed": "anything"} for row in wanted]

    monkeypatch.setattr(gpu, "_followed", followed)
    cases = gpu.run(False, ["/BERT-base/full/1x8x1/update"])
    assert [case.case for case in cases] == ["h100/BERT-base/full/1x8x1/update: faults"]
    told = capsys.readouterr().out
    assert "v5e: 1 row(s) left out: no libtpu." in told
    assert "v6e: 1 row(s) left out: no libtpu." in told


def test_only_named_products_may_be_float32() -> None:
    pooling = Product("a = b × c", "jit(f)/while/body/transpose(jvp(rt,td->rd))/dot_general")
    scores = Product("d = e × f", "jit(f)/vmap(BTNH,BSNH->BNTS)/dot_general")
    of_layer, unknown = (
        Product("g = h × i", "jit(f)/BertLayer/output/dot_general"),
        Product("j", ""),
    )
    every = [pooling, scores, of_layer, unknown]
    assert float32.unnamed([pooling], "cuda") == []
    assert float32.unnamed(every, "tpu") == [
        "g = h × i, jit(f)/BertLayer/output/dot_general",
        "j, of unknown source",
    ]
    assert len(float32.unnamed(every, "cuda")) == 3
    assert float32.of_attention(every) == 1


def test_logits_of_all_tokens_are_found_in_a_program() -> None:
    sampled, vocab = SHAPE.sampled, 1000
    block = f"f32[{sampled},128]{{1,0}} fusion, bf16[{vocab},64]{{1,0}} parameter"
    assert arrays_of_logits(block, vocab, SHAPE) == 0
    assert arrays_of_logits(f"{block} f32[{sampled},{vocab}]{{1,0}} dot", vocab, SHAPE) == 1
    row = {"program": TOKENS, "arrays_of_logits": 1, "logits": sampled * vocab}
    assert [case.holds for case in tokens_cases("a", row)] == [False]
    assert [case.holds for case in tokens_cases("a", row | {"arrays_of_logits": 0})] == [True]


def test_a_token_must_not_ask_the_host() -> None:
    """The loops that read prompts, the first two, may; those that draw may not."""

    def cases(**changed: int) -> list[Case]:
        reading, drawing = Launches(70, 1500, 1, 0)._asdict(), Launches(500, 500, 0, 0)._asdict()
        rounds = [reading, reading, drawing, drawing | {"launches": 700} | changed]
        row = {"program": SAMPLING, "platform": "cuda", "rounds": rounds}
        return tokens_cases("a", row | {"round_seconds": [1.0, 1.0, 0.004, 0.006]})

    asked, kernels, *milliseconds = cases()
    assert (asked.value, asked.holds, kernels.value) == (0, True, 700)
    assert [case.value for case in milliseconds] == [4.0, 6.0]
    assert [cases(host_loops=1)[0].holds, cases(host_branches=2)[0].value] == [False, 2]
