"""The command `show`, and its page in a headless Chromium: what a reader does, hostile texts.

Without a browser the page's test is skipped; Debian has one as `chromium-headless-shell`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qrag_jax.metrics.facts import fact_em
from qrag_jax.metrics.row_log import PREDICTIONS, RETRIEVALS
from tests.entry_points import EVAL_EVERY, STEPS, Commands, refusal
from tests.evaluators.shown_pages import HOSTILE, prediction, read_page
from tests.retrieval_logs import played_rows

# Debian's packages chromium and chromium-headless-shell, and what others call them.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


def test_a_scored_run_and_a_training(
    scored_run: Path, finished_run: Path, commands: Commands, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    commands.succeed("show", str(scored_run), f"--out={page}")
    read = read_page(page)
    (section,) = read["sections"]
    assert "my-run" in section["title"]
    assert len(section["episodes"]) == 4
    for episode in section["episodes"]:
        assert all(isinstance(step["found"][0][1], float) for step in episode["steps"])
        assert episode["before"]["steps"]
        assert -1e-4 < episode["regret"] <= 1
    curves = {curve["name"]: curve for curve in read["runs"][0]["curves"]}
    assert curves["train/loss"]["steps"] == [*range(1, STEPS + 1)]
    assert curves["eval/return"]["steps"] == [*range(0, STEPS + 1, EVAL_EVERY)]
    commands.succeed("show", str(finished_run), f"--out={page}")
    assert read_page(page)["sections"]


def test_bad_input(commands: Commands, finished_run: Path, tmp_path: Path) -> None:
    run, none = str(finished_run), str(tmp_path / "none")
    for words in ([run, none], [str(tmp_path)], [run, f"--out={tmp_path}"]):
        assert words[-1].removeprefix("--out=") in refusal(commands.run("show", *words))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the browser

# It acts as a reader does, and leaves what it finds in the page. A click opens what Enter does.
READER = """
const problems = [], wait = (ms) => new Promise((done) => setTimeout(done, ms));
addEventListener("error", (event) => problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => problems.push(event.blockedURI));
(async () => {
  const section = document.querySelector("section[data-kind=chunks]"), found = {};
  const search = section.querySelector("input");
  search.value = "onerror";
  search.dispatchEvent(new Event("input"));
  await wait(1000);
  found.few = section.querySelector("output").textContent;
  document.querySelectorAll("details").forEach((item) => { item.open = true; });
  await wait(500);
  found.hostile = section.querySelector("details").textContent;
  found.folded = section.querySelectorAll("details.more").length;
  const solved = section.querySelector("select");
  search.value = "";
  solved.value = "changed";
  solved.dispatchEvent(new Event("change"));
  found.changed = section.querySelector("output").textContent;
  for (let times = 0; times < 3; times++) {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "j", bubbles: true}));
  }
  found.third = document.activeElement === document.querySelectorAll("summary")[2];
  found.bands = document.querySelectorAll("path.band").length;
  found.active = document.querySelectorAll("img, iframe, a, form, main script").length;
  found.requests = performance.getEntriesByType("resource").map((each) => each.name);
  document.body.dataset.found = JSON.stringify({...found, problems});
})();
"""


@pytest.mark.skipif(BROWSER is None, reason=f"there is no browser here: none of {NAMES}")
def test_a_reader_opens_episodes_and_planted_markup_does_not_run(
    commands: Commands, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    solved = {}
    for label, seed in (("best-10", 0), ("untrained", 1)):
        rows = played_rows(200, seed)
        texts = ["long " * 400, *rows[17].pred_texts[1:]]
        hostile = {"question": HOSTILE, "answer": HOSTILE, "pred_texts": texts}
        rows[17] = dataclasses.replace(rows[17], **hostile)
        RETRIEVALS.append(run / "eval" / label / "eval_seed42.jsonl", rows)
        solved[label] = [fact_em(row.sf_idx, row.pred_idx) for row in rows]
    changed = sum(a != b for a, b in zip(*solved.values(), strict=True))
    config = {"pqn": {"gamma": 0.9}, "env": {"max_steps": 5}, "system": "q_rag"}
    (run / "config.json").write_text(json.dumps(config))
    scores = {"eval/return": 0.5, "eval_half_width/return": 0.1, HOSTILE: 1.0}
    lines = [json.dumps({"step": step, **scores}) + "\n" for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(lines))
    PREDICTIONS.append(tmp_path / "tokens.jsonl", [prediction(n, n / 4) for n in range(3)])
    page = tmp_path / "page.html"
    commands.succeed("show", str(run), str(tmp_path / "tokens.jsonl"), f"--out={page}")

    # The reader's script is allowed besides the page's, by its digest.
    digest = base64.b64encode(hashlib.sha256(READER.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ")
    page.write_text(text.replace("</body>", f"<script>{READER}</script></body>"), encoding="utf-8")
    flags = ["--headless", "--disable-gpu", "--virtual-time-budget=9999", "--dump-dom"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # as root it has no other way
    words = [str(BROWSER), *flags, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    read = re.search('data-found="(.*?)"', shown)
    assert read is not None
    found = json.loads(html.unescape(read[1]))
    assert (found["problems"], found["requests"], found["active"]) == ([], [], 0)
    assert "of 1 found, of 200" in found["few"]
    assert HOSTILE in found["hostile"]
    assert f"of {changed} found, of 200" in found["changed"]
    assert (found["folded"], found["third"], found["bands"]) == (2, True, 1)
