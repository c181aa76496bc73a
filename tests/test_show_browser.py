"""The page of `show` in a headless Chromium: ten thousand episodes, hostile texts, the keyboard.

Without a browser these are skipped; Debian has one as `chromium-headless-shell`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from qrag_jax.metrics import answer_log, predictions, retrieval_log
from tests.browser import NAMES, Page, opened_browser, path_of_browser
from tests.entry_points import Commands
from tests.evaluators.shown_pages import HOSTILE, prediction
from tests.evaluators.shown_pages import Page as ReadPage
from tests.retrieval_logs import played_rows

pytestmark = pytest.mark.long

EPISODES = 10_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    path = path_of_browser()
    if path is None:
        pytest.skip(f"there is no browser here: none of {', '.join(NAMES)}")
    with opened_browser(path) as page:
        page.resize(1200, 900)
        yield page


@pytest.fixture(scope="module")
def many(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 10,000 episodes of Q-RAG, the texts of which are as long as Wikipedia's, and one of
    a few episodes of tokens.
    """
    folder = tmp_path_factory.mktemp("many")
    for label, seed in (("best-10", 0), ("untrained", 1)):
        rows = [
            dataclasses.replace(
                row,
                question=f"Question {n}, of how many facts?",
                pred_texts=[f"{n}: {text} " + "some words " * 40 for text in row.pred_texts],
            )
            for n, row in enumerate(played_rows(EPISODES, seed))
        ]
        rows[17] = dataclasses.replace(rows[17], question=HOSTILE, answer=HOSTILE)
        retrieval_log.append(folder / "run" / "eval" / label / "eval_seed42.jsonl", rows)
    config = {"pqn": {"gamma": 0.9}, "env": {"max_steps": 5}, "system": "q_rag"}
    (folder / "run" / "config.json").write_text(json.dumps(config))
    lines = [{"step": n, "eval/return": n / 10, "untrained/return": 0.1} for n in range(8)]
    lines[3][HOSTILE] = 1.0
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for name in ("run", "other"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "metrics.jsonl").write_text(text)
    answer_log.append(folder / "tokens.jsonl", [prediction(n, n / 4) for n in range(3)])
    (folder / "tokens.json").write_text(json.dumps({"kind": predictions.KIND}))
    out = folder / "page.html"
    given = [str(folder / name) for name in ("run", "other", "tokens.jsonl")]
    commands.succeed("show", *given, f"--out={out}")
    return out


@pytest.fixture
def opened(browser: Page, many: Path) -> Iterator[Page]:
    """The page, freshly loaded; at the end nothing may have gone wrong in it."""
    browser.problems.clear()
    browser.requests.clear()
    seconds = browser.open(many)
    assert seconds < 30  # about 1 s; a machine that is busy with other tests takes longer
    yield browser
    assert browser.problems == []
    assert browser.requests == [many.absolute().as_uri()]


FIRST = "document.querySelector('section[data-kind=chunks]')"
TOKENS = "document.querySelector('section[data-kind=tokens]')"


def chosen(page: Page, number: int, value: str) -> str:
    """Chooses in one of the filters; returns what the list then says."""
    select = f"{FIRST}.querySelectorAll('select')[{number}]"
    page.value(f"{select}.value = {value!r}; {select}.dispatchEvent(new Event('change'))")
    return page.value(f"{FIRST}.querySelector('output').textContent")


def test_ten_thousand_episodes_are_filtered_and_turned(opened: Page, many: Path) -> None:
    section = ReadPage(many).sections[0]
    episodes = section["episodes"]
    assert len(episodes) == EPISODES
    count = f"{FIRST}.querySelectorAll('details').length"
    assert opened.value(count) == 50  # of one page
    assert opened.value(f"{FIRST}.querySelector('output').textContent") == "1–50 of 10000 episodes"
    worst = max(episode["regret"] for episode in episodes)
    assert f"regret {worst:.3f}" in opened.value(f"{FIRST}.querySelector('summary').textContent")
    solved = sum(episode["solved"] for episode in episodes)
    assert chosen(opened, 0, "yes") == f"1–50 of {solved} found, of 10000 episodes"
    both = sum(episode["solved"] and episode["hops"] == 3 for episode in episodes)
    assert chosen(opened, 1, "3") == f"1–50 of {both} found, of 10000 episodes"
    marks = opened.value(f"[...{FIRST}.querySelectorAll('.mark')].map((e) => e.textContent)")
    assert {*marks} == {"✓ all facts found"}
    assert chosen(opened, 0, "") != chosen(opened, 1, "")
    opened.value(f"{FIRST}.querySelectorAll('button')[1].click()")
    assert opened.value(f"{FIRST}.querySelector('output').textContent").startswith("51–100 of")


def test_an_episode_opens_by_the_keyboard_and_shows_its_path(opened: Page, many: Path) -> None:
    episode = ReadPage(many).sections[0]["episodes"][0]
    chosen(opened, 2, "log")
    opened.value(f"{FIRST}.querySelector('summary').focus()")
    opened.press("Enter", 13, "\r")
    shown = opened.value(
        "new Promise((done) => setTimeout(() => "
        f"done({FIRST}.querySelector('details').innerText), 300))"
    )
    taken, early = episode["steps"], episode["before"]["steps"]
    for place, (index, _, q) in enumerate(taken, start=1):
        assert f"step {place}" in shown
        assert f"Q {q:.3f}" in shown
        assert f"chunk {index}" in shown
    heads = opened.value(f"{FIRST}.querySelector('details').querySelectorAll('.path > li').length")
    missed = len({index for index, _ in episode["gold"]} - {index for index, _, _ in taken})
    assert heads == len(taken) + len(early) + missed
    assert "Before training: return" in shown


def test_texts_are_searched(opened: Page, many: Path) -> None:
    opened.value(f"{FIRST}.querySelector('input').focus()")
    opened.write("QUESTION 4321,")
    wait = "new Promise((done) => setTimeout(() => done(WHAT), 1500))"
    what = f"{FIRST}.querySelector('output').textContent"
    assert opened.value(wait.replace("WHAT", what)) == "1–1 of 1 found, of 10000 episodes"
    opened.value(f"{FIRST}.querySelector('input').value = ''")
    opened.value(f"{FIRST}.querySelector('input').focus()")
    opened.write("9876: chunk 3 ")  # of a chunk that was taken
    found = opened.value(wait.replace("WHAT", what))
    assert found == ("1–1 of 1 found, of 10000 episodes")


def test_planted_markup_does_not_run(opened: Page) -> None:
    opened.value(f"{FIRST}.querySelector('input').value = 'onerror'")
    opened.value(f"{FIRST}.querySelector('input').dispatchEvent(new Event('input'))")
    text = opened.value(
        "new Promise((done) => setTimeout(() => { "
        "for (const item of document.querySelectorAll('details')) item.open = true; "
        f"setTimeout(() => done({FIRST}.querySelector('details').textContent), 500) }}, 1500))"
    )
    assert HOSTILE in text
    curve = (
        "[...document.querySelectorAll('option')].some((each) => each.value.includes('onerror'))"
    )
    assert opened.value(curve)
    assert opened.value("document.title").startswith("run, other, many")
    assert opened.value("document.querySelectorAll('img, iframe, a, form').length") == 0


def test_curves_of_two_runs_have_axes_and_a_legend(opened: Page) -> None:
    labels = opened.value("[...document.querySelectorAll('svg[role=img]')].map(e => e.ariaLabel)")
    assert any(each.startswith("eval/return: run from 0.000 to 0.700; other") for each in labels)
    legend = opened.value("[...document.querySelectorAll('.legend li')].map(e => e.textContent)")
    assert legend == ["run (q_rag)", "other", "before training"]
    chart = "document.querySelector('svg[role=img]')"
    texts = opened.value(f"[...{chart}.querySelectorAll('text')].map((each) => each.textContent)")
    assert {"0.0", "1.0", "0", "6", "optimizer step"} <= {*texts}
    # A line and two markers of other forms a run, and a dashed line for what was before.
    dashed = f"{chart}.querySelectorAll('path[stroke-dasharray=\"6 4\"]').length"
    assert opened.value(dashed) == 2
    assert opened.value(f"{chart}.querySelectorAll('circle').length") == 8


def test_tokens_have_masks_and_log_probabilities(opened: Page) -> None:
    opened.value(f"{TOKENS}.querySelector('details').open = true")
    wait = "new Promise((done) => setTimeout(() => done(WHAT), 300))"
    classes = f"[...{TOKENS}.querySelectorAll('.token')].map((each) => each.className)"
    kinds = opened.value(wait.replace("WHAT", classes))
    observed, trained = "token observed", "token trained"
    assert kinds == [observed] * 3 + [trained] * 2 + [observed] * 2 + [trained] * 3
    titles = opened.value(f"[...{TOKENS}.querySelectorAll('.token')].map((each) => each.title)")
    assert titles[4] == "id 9, log-prob -0.2500, p 0.7788"
    visible = f"getComputedStyle({TOKENS}.querySelector('.token sub')).display"
    assert opened.value(visible) == "none"
    opened.value(f"{TOKENS}.querySelector('.tools button').click()")
    assert opened.value(visible) != "none"


def test_dark_on_light_and_no_wider_than_a_phone(opened: Page) -> None:
    """Every text has a contrast of at least 4.5 to 1, as WCAG asks, and nothing is cut off."""
    script = (Path(__file__).parent / "contrast.js").read_text()
    assert opened.value(script) == []
    opened.resize(400, 800)
    wide = opened.value("document.documentElement.scrollWidth")
    opened.resize(1200, 900)
    assert wide <= 400


def test_a_page_of_a_log_alone(browser: Page, commands: Commands, many: Path) -> None:
    """A log that lies anywhere is shown without curves, and says so."""
    log = many.parent / "alone" / "log.jsonl"
    log.parent.mkdir()
    shutil.copy(many.parent / "tokens.jsonl", log)
    told = commands.succeed("show", str(log))
    assert f"{log} has no metrics of a training, so there are no curves." in told
    browser.open(log.parent / "show.html")
    assert "has no metrics of a training" in browser.value("document.body.innerText")
    assert browser.value("document.querySelectorAll('svg').length") == 0
