// Lists of episodes: filters, order, pages; the body of an episode is made when it is opened.
const PAGE = 50;

function chunkPath(section, title, steps, gold, other) {
  const list = element("ol", "path");
  steps.forEach(([index, text, q], place) => {
    const isGold = gold.has(index), item = element("li", isGold ? "gold" : "");
    item.append(headLine(element("b", "", `step ${place + 1}`), q === null ? "Q not logged" : `Q ${number(q)}`, `chunk ${index}`,
      isGold ? element("span", "star", "★ gold") : "not gold", other && !other.has(index) ? "only here" : null), element("div", "text", section.texts[text]));
    list.append(item);
  });
  if (!steps.length) list.append(element("li", "", "(no chunk was taken)"));
  return element("div", "", element("h3", "", title), list);
}

function chunkBody(section, episode) {
  const gold = new Set(episode.gold.map(([index]) => index)), after = new Set(episode.steps.map(([index]) => index));
  const before = episode.before, early = before ? new Set(before.steps.map(([index]) => index)) : null;
  const paths = element("div", "paths", chunkPath(section, "Taken by the trained retriever", episode.steps, gold, early),
    before ? chunkPath(section, before.score === null ? "Before training" : `Before training: return ${number(before.score)}`, before.steps, gold, after) : null);
  const missed = episode.gold.filter(([index]) => !after.has(index)), part = element("div", "", paths);
  if (missed.length) {
    part.append(element("h3", "", `Gold that was not taken: ${missed.length}`), element("ol", "path", ...missed.map(([index, text]) =>
      element("li", "gold", headLine(element("span", "star", "★ gold"), `chunk ${index}`, early && early.has(index) ? "taken before training" : null), element("div", "text", section.texts[text])))));
  }
  return part;
}

function searchPath(title, steps) {
  const list = element("ol", "path");
  steps.forEach((step, place) => {
    const names = element("ul", "names", ...step.names.map(([name, score, isGold]) =>
      element("li", "", isGold ? element("span", "star", "★ gold ") : null, name, score === null ? "" : ` (${number(score)})`)));
    list.append(element("li", step.names.some((each) => each[2]) ? "gold" : "", headLine(element("b", "", `search ${place + 1}`), ...step.told),
      element("div", "query", step.query || "(no query)"), step.text ? element("div", "text", step.text) : null, step.names.length ? names : headLine("found nothing")));
  });
  return element("div", "", element("h3", "", title), list);
}

function searchBody(section, episode) {
  return element("div", "paths", searchPath("By the trained model", episode.steps), episode.before ? searchPath("Before training", episode.before.steps) : null);
}

const BODIES = { chunks: chunkBody, tokens: tokenBody, hops: searchBody, agents: searchBody, rewrites: searchBody };

function facts(rows) {
  const list = element("dl", "facts");
  for (const [name, text] of rows) list.append(element("dt", "", name), element("dd", "", text === "" ? "–" : text));
  return list;
}

function mark(section, solved) {
  if (solved === null) return element("span", "mark unknown", "? unknown");
  return solved ? element("span", "mark yes", `✓ ${section.words.solved}`) : element("span", "mark no", `✗ ${section.words.unsolved}`);
}

function episodeItem(section, episode) {
  const words = section.words, item = element("details", "episode");
  item.append(element("summary", "", mark(section, episode.solved),
    element("span", "number", episode.hops === null ? "" : `${words.hops} ${episode.hops}`),
    element("span", "number", words.score && episode.score !== null ? `${words.score} ${number(episode.score)}` : ""),
    element("span", "number", episode.regret === null ? "" : `regret ${number(episode.regret)}`),
    element("span", "question", episode.question)));
  const fill = () => {
    if (item.children.length > 1) return;
    item.append(element("div", "body", facts(episode.facts), BODIES[section.kind](section, episode)));
  };
  item.addEventListener("toggle", () => { if (item.open) fill(); });
  item.fill = fill; // for "open all", which must not wait for the event
  return item;
}

// Whether an episode holds the words. Texts of chunks are looked at once each, not once an episode.
function finder(section, words) {
  const has = (text) => text.toLowerCase().includes(words);
  const texts = new Set(section.texts.flatMap((text, at) => has(text) ? [at] : []));
  const said = (turns) => (turns || []).some((turn) => has(turn.observed.map((at) => section.tokens[at][1]).join("")) || has(turn.sampled.map((at) => section.tokens[at][1]).join("")));
  const taken = (steps) => (steps || []).some((step) => Array.isArray(step) ? texts.has(step[1]) : has(step.query) || has(step.text || "") || step.names.some(([name]) => has(name)));
  return (episode) => has(episode.question) || episode.facts.some(([, text]) => has(text)) ||
    taken(episode.gold) || taken(episode.steps) || said(episode.turns);
}

const ORDERS = {
  log: ["as in the log", null],
  regret: ["worst regret first", (e) => e.regret === null ? -Infinity : e.regret],
  best: ["least regret first", (e) => e.regret === null ? -Infinity : -e.regret],
  lost: ["lost most by training first", (e) => e.before && e.before.score !== null && e.score !== null ? e.before.score - e.score : -Infinity],
  won: ["won most by training first", (e) => e.before && e.before.score !== null && e.score !== null ? e.score - e.before.score : -Infinity],
};

function episodeSection(section, place) {
  const episodes = section.episodes, words = section.words, id = `section-${place}`;
  const state = { found: episodes, at: 0 }, list = element("div", "episodes"), told = element("output");
  const has = (test) => episodes.some(test), counts = [...new Set(episodes.map((each) => each.hops))].filter((each) => each !== null).sort((a, b) => a - b);
  const solved = choice([["", "all"], ["yes", words.solved], ["no", words.unsolved], ...(has((e) => e.solved === null) ? [["unknown", "unknown"]] : [])], () => renew());
  const hops = choice([["", "any"], ...counts.map((count) => [count, `${count}`])], () => renew());
  const comparable = has((e) => e.before && e.before.score !== null && e.score !== null);
  const orders = Object.entries(ORDERS).filter(([name]) => name === "log" || (name === "lost" || name === "won" ? comparable : words.regret));
  const order = choice(orders.map(([name, [text]]) => [name, text]), () => renew());
  if (words.regret) order.value = "regret";
  const search = element("input");
  search.type = "search";
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(renew, 200); });
  const previous = button("◀ Previous", () => turn(-1)), next = button("Next ▶", () => turn(1));
  const open = button("Open all on this page", () => { for (const item of list.children) { item.fill(); item.open = true; } });
  const shut = button("Close all", () => { for (const item of list.children) item.open = false; });

  function renew() {
    const text = search.value.trim().toLowerCase(), holds = text ? finder(section, text) : () => true, value = ORDERS[order.value][1];
    const wanted = { yes: true, no: false, unknown: null }[solved.value];
    state.found = episodes.filter((e) => (solved.value === "" || e.solved === wanted) && (hops.value === "" || e.hops === Number(hops.value)) && holds(e));
    if (value) {
      const keyed = state.found.map((e) => [value(e), e]);
      keyed.sort((a, b) => b[0] === a[0] ? 0 : b[0] - a[0]); // stable: equal ones stay as in the log
      state.found = keyed.map(([, e]) => e);
    }
    state.at = 0;
    draw();
  }
  function turn(by) {
    state.at += by * PAGE;
    draw();
    part.scrollIntoView({ block: "start" });
    told.focus();
  }
  function draw() {
    const count = state.found.length, end = Math.min(state.at + PAGE, count), of = count === episodes.length ? "" : ` found, of ${episodes.length}`;
    told.textContent = count ? `${state.at + 1}–${end} of ${count}${of} episodes` : `None of ${episodes.length} episodes`;
    previous.disabled = state.at === 0;
    next.disabled = end >= count;
    list.replaceChildren(...state.found.slice(state.at, end).map((e) => episodeItem(section, e)));
  }

  told.tabIndex = -1;
  told.setAttribute("aria-live", "polite");
  const heading = element("h2", "", section.title);
  heading.id = id;
  const part = element("section", "", heading, noteList(section.notes), words.regret ? element("p", "regret", `Regret: ${words.regret}`) : null,
    element("div", "bar", labelled("Solved", solved), counts.length > 1 ? labelled(words.hops, hops) : null, labelled("Order", order), labelled("Search in all texts", search, "find")),
    element("div", "pager", told, previous, next, open, shut), list);
  part.setAttribute("aria-labelledby", id);
  part.dataset.kind = section.kind;
  renew();
  return part;
}

(() => {
  const { about, runs } = dataOf("data-runs"), main = document.getElementById("main");
  document.getElementById("about").textContent = about;
  if (runs.length) main.append(curves(runs));
  for (let place = 0, section; (section = dataOf(`data-section-${place}`)); place++) main.append(episodeSection(section, place));
  document.body.dataset.ready = "yes";
})();
