"use strict";
// Texts are only ever set with textContent, so nothing in the data is read as HTML.
function element(name, classes, ...inside) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  made.append(...inside.filter((each) => each !== null && each !== undefined && each !== ""));
  return made;
}

function drawn(name, attributes, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...inside);
  return made;
}

const button = (text, onclick) => Object.assign(element("button", "", text), { type: "button", onclick });
const choice = (options, onchange) =>
  Object.assign(element("select", "", ...options.map(([value, text]) => Object.assign(element("option", "", text), { value }))), { onchange });

// What is long is folded behind its beginning: `rest` are further parts, as nodes or texts.
const FOLD = 400; // characters, or half as many tokens
const folded = (classes, first, rest, what) =>
  element("div", classes, ...first, rest.length ? element("details", "more", element("summary", "", `… ${what} more`), ...rest) : null);

function textOf(text) {
  const cut = text.length > FOLD * 1.5 ? text.lastIndexOf(" ", FOLD) + 1 || FOLD : text.length;
  return folded("text", [text.slice(0, cut)], cut < text.length ? [text.slice(cut)] : [], `${text.length - cut} characters`);
}

// A line of short facts; each is an element, so that there is space between them.
const headLine = (...inside) => element("div", "head", ...inside.map((each) => (typeof each === "string" && each ? element("span", "", each) : each)));
const labelled = (text, control, classes = "") => element("label", classes, text, control);
const noteList = (notes) => (notes.length ? element("ul", "notes", ...notes.map((each) => element("li", "", each))) : null);

const number = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6) ? value.toFixed(3) : value.toExponential(2));

// ---------------------------------------------------------------- learning curves
// One small chart a metric, all runs in it. Runs differ by colour (run0 to run7) and by marker.
const MARKERS = "●■▲◆✚✖", HALF = "eval_half_width/";
// What is drawn first, where a run has it; of a run without any of these, the first six.
const FIRST = /^(eval\/(fact_em|fact_f1|return|em|f1|recall|reward|hop\d+\/(all_gold|ap)|(ndcg|recall|rr)@\d+)|train\/(loss|return))$/;
const BASELINES = [["untrained/", "dashed: before training", "6 4"], ["single_step/", "dotted: one look-up before training", "2 3"], ["original/", "dotted: original queries", "2 3"]];

// Five round numbers or so, with their texts.
function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 4)), step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= (high - low) / 5);
  const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  return Array.from({ length: count }, (_, i) => (Math.ceil(low / step - 1e-9) + i) * step).map((value) => [value, String(Number(value.toPrecision(4)))]);
}

// The lines of a chart: of each run its own, with the halves of its intervals, and dashed ones of what it began with.
function linesOf(runs, name) {
  const score = name.startsWith("eval/") && name.slice(5);
  return runs.flatMap((run, place) => {
    const named = (other) => run.curves.find((each) => each.name === other), own = named(name), halves = score && named(HALF + score);
    if (!own) return [];
    const style = { run: run.title, classes: `run${place % 8}`, marker: MARKERS[place % MARKERS.length] };
    const before = BASELINES.map(([prefix, , dash]) => ({ ...style, dash, base: score && named(prefix + score) })).filter((each) => each.base);
    const flat = (each) => ({ ...each, steps: [own.steps[0], own.steps.at(-1)], values: Array(2).fill(each.base.values.at(-1)) });
    const half = own.steps.map((step) => (halves && halves.values[halves.steps.indexOf(step)]) || 0);
    return [{ ...style, ...own, dash: "none", half }, ...before.map(flat)];
  });
}

function chart(runs, name) {
  const all = linesOf(runs, name), W = 420, H = 240, left = 52, right = 404, top = 10, bottom = 202;
  const xs = all.flatMap((each) => each.steps), ends = (each, sign) => each.values.map((value, i) => value + sign * (each.half ? each.half[i] : 0));
  const ys = all.flatMap((each) => [...ends(each, -1), ...ends(each, 1)]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (name.startsWith("eval/") && all.every((each) => each.values.every((value) => value >= 0 && value <= 1))) { y0 = 0; y1 = y1 > 0.5 ? 1 : Math.max(y1 * 1.15, 0.05); }
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= pad; y1 += pad; }
  const x = (v) => (left + ((v - x0) / (x1 - x0)) * (right - left)).toFixed(1);
  const y = (v) => (bottom - ((Math.min(Math.max(v, y0), y1) - y0) / (y1 - y0)) * (bottom - top)).toFixed(1);
  const spoken = all.filter((each) => each.half).map((each) => `${each.run} from ${number(each.values[0])} to ${number(each.values.at(-1))}`);
  const svg = drawn("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${name}: ${spoken.join("; ")}` });
  const line = (d, classes, more) => svg.append(drawn("path", { d, class: classes, ...more }));
  const label = (x, y, text, anchor) => svg.append(drawn("text", { x, y, "text-anchor": anchor }, text));
  for (const [value, text] of ticks(y0, y1)) line(`M${left} ${y(value)}H${right}`, "grid"), label(left - 6, +y(value) + 4, text, "end");
  for (const [value, text] of ticks(x0, x1)) line(`M${x(value)} ${bottom}v4`, "axis"), label(x(value), bottom + 17, text, "middle");
  line(`M${left} ${top}V${bottom}H${right}`, "axis");
  label((left + right) / 2, H - 5, "optimizer step", "middle");
  for (const { steps, values, half, classes, dash, marker } of all) {
    const path = (heights) => steps.map((step, i) => `${x(step)} ${y(heights[i])}`);
    if (half?.some((each) => each)) line(`M${[...path(ends({ values, half }, 1)), ...path(ends({ values, half }, -1)).reverse()].join("L")}Z`, `band ${classes}`);
    line(`M${path(values).join("L")}`, `line ${classes}`, { "stroke-dasharray": dash });
    const marked = (i) => half && (i % Math.ceil(steps.length / 8) === 0 || i === steps.length - 1);
    steps.forEach((step, i) => marked(i) && svg.append(drawn("text", { x: x(step), y: y(values[i]), class: `marker ${classes}` }, marker)));
  }
  return element("figure", "", element("figcaption", "", name), svg);
}

function curveSection(runs) {
  const names = [...new Set(runs.flatMap((run) => run.curves.map((each) => each.name)))], further = [...BASELINES, [HALF, "band: 95 % interval over the questions"]];
  const own = names.filter((name) => !further.some(([prefix]) => name.startsWith(prefix))).sort();
  const legend = element("ul", "legend",
    ...runs.map((run, place) => run.curves.length ? element("li", `run${place % 8}`, `${MARKERS[place % MARKERS.length]} ${run.title}${run.system && ` (${run.system})`}`) : null),
    ...further.map(([prefix, text]) => names.some((each) => each.startsWith(prefix)) ? element("li", "", text) : null));
  const first = own.filter((name) => FIRST.test(name));
  const charts = element("div", "charts", ...(first.length ? first : own.slice(0, 6)).map((name) => chart(runs, name)));
  const more = choice([["", `add one of ${own.length}…`], ...own.map((name) => [name, name])], () => {
    charts.append(chart(runs, more.value));
    charts.lastChild.scrollIntoView({ block: "nearest" });
    more.value = "";
  });
  const notes = runs.flatMap((run) => run.notes.map((note) => (runs.length > 1 ? `${run.title}: ${note}` : note)));
  const part = element("section", "", element("h2", "", "Learning curves"), noteList(notes));
  if (names.length) part.append(legend, charts, element("div", "bar more", labelled("Another curve", more)));
  return part;
}

// ---------------------------------------------------------------- episodes
const PAGE = 50;
const changed = (e) => e.before !== null && e.solved !== null && e.before.solved !== null && e.before.solved !== e.solved;
const SOLVED = { all: () => true, right: (e) => e.solved === true, wrong: (e) => e.solved === false, unknown: (e) => e.solved === null, changed };

function tokenSpan([id, text], kind, logProb) {
  const made = element("span", `token ${kind}`, text ? text.replaceAll("\n", "↵\n") : "∅", logProb === undefined ? null : element("sub", "", logProb.toFixed(2)));
  return Object.assign(made, { title: `id ${id}` + (logProb === undefined ? "" : `, log-prob ${logProb.toFixed(4)}, p ${Math.exp(logProb).toFixed(4)}`) });
}

function tokensOf(step) {
  const spans = step.tokens.map((token, i) => tokenSpan(token, step.kind, step.log_probs[i]));
  const cut = spans.length > FOLD ? FOLD / 2 : spans.length;
  return folded(`tokens ${step.kind}`, spans.slice(0, cut), spans.slice(cut), `${spans.length - cut} tokens`);
}

// What was done: `steps`; `other`: names that the other model found, to mark what only this one did.
function path(section, title, steps, other) {
  const found = ([name, score, gold, text]) => element("li", gold ? "gold" : "",
    headLine(element("b", "", name), score === null ? "" : `${section.words.found} ${number(score)}`.trim(), gold ? element("span", "star", "★ gold") : null, other && !other.has(name) ? "only here" : ""),
    text ? textOf(text) : null);
  const item = (step, place) => {
    if (step.tokens.length) return element("li", "", headLine(...step.head), tokensOf(step));
    return element("li", "", headLine(element("b", "", steps.length > 1 ? `step ${place + 1}` : ""), ...step.head),
      step.query === null ? null : element("div", "query", step.query || "(no query)"), step.text ? textOf(step.text) : null,
      step.found.length ? element("ul", "found", ...step.found.map(found)) : headLine("found nothing"));
  };
  return element("div", "", element("h3", "", title), element("ol", "path", ...steps.map(item)));
}

function episodeBody(section, episode) {
  const before = episode.before, names = (steps) => new Set(steps.flatMap((step) => step.found.map((each) => each[0])));
  const facts = [["question", episode.question], ["answered", episode.answered], ["right answer", episode.answers.join(" / ") || null], ...episode.facts, ["id", episode.key.filter((each) => each).join(", ")]];
  const known = facts.filter(([, text]) => text !== null).flatMap(([name, text]) => [element("dt", "", name), element("dd", "", textOf(text || "–"))]);
  const score = before && before.score !== null ? `${section.words.score} ${number(before.score)}` : "";
  const early = before && path(section, ["Before training", score, before.answered].filter((each) => each).join(", "), before.steps, names(episode.steps));
  const missed = { head: [], query: null, tokens: [], found: episode.missed };
  // While it is open, the style shows the numbers below the tokens.
  const tools = section.kind === "tokens" ? element("details", "tools", element("summary", "", "Log-probabilities of sampled tokens")) : null;
  return element("div", "body", element("dl", "facts", ...known), tools,
    element("div", "paths", path(section, "By the trained model", episode.steps, before && names(before.steps)), early,
      missed.found.length ? path(section, `Gold that was not found: ${missed.found.length}`, [missed]) : null));
}

function episodeItem(section, episode) {
  const words = section.words;
  const value = (name, text) => element("span", "number", text === null || !name ? "" : `${name} ${text}`);
  const mark = { true: ["yes", `✓ ${words.solved}`], false: ["no", `✗ ${words.unsolved}`], null: ["unknown", "? unknown"] }[episode.solved];
  const item = element("details", "episode", element("summary", "", element("span", `mark ${mark[0]}`, mark[1], changed(episode) ? ` (was ${episode.solved ? "✗" : "✓"})` : ""), value(words.hops, episode.hops),
    value(words.score, episode.score === null ? null : number(episode.score)), value("regret", episode.regret === null ? null : number(episode.regret)), element("span", "question", episode.question)));
  item.addEventListener("toggle", () => item.append(episodeBody(section, episode)), { once: true });
  return item;
}

// Whether an episode holds the words.
function holds(e, words) {
  const has = (text) => (text || "").toLowerCase().includes(words), found = ([name, , , text]) => has(name) || has(text);
  const step = (each) => has(each.query) || has(each.text) || has(each.tokens.map(([, text]) => text).join("")) || each.found.some(found);
  return [e.question, e.answered, ...e.answers, ...e.key].some(has) || e.facts.some(([, text]) => has(text)) || e.steps.some(step) || e.missed.some(found);
}

function episodeSection(section) {
  const { episodes, words } = section, list = element("div", "episodes"), status = element("output"), has = (test) => episodes.some(test);
  let shown = episodes, timer = 0;
  const counts = [...new Set(episodes.map((each) => each.hops))].filter((each) => each !== null).sort((a, b) => a - b);
  const named = { right: words.solved, wrong: words.unsolved, changed: "changed by training" };
  const solved = choice(Object.keys(SOLVED).filter((name) => has(SOLVED[name])).map((name) => [name, named[name] || name]), renew);
  const hops = choice([["", "any"], ...counts.map((count) => [count, `${count}`])], renew);
  const order = choice([...(words.regret ? [["regret", "worst regret first"]] : []), ["log", "as in the log"]], renew);
  const search = Object.assign(element("input"), { type: "search", oninput: () => { clearTimeout(timer); timer = setTimeout(renew, 200); } });
  const more = button(`Show ${PAGE} more`, draw);
  const [open, shut] = [true, false].map((is) => button(is ? "Open all" : "Close all", () => { for (const item of list.children) item.open = is; }));

  function renew() {
    const text = search.value.trim().toLowerCase();
    shown = episodes.filter((e) => SOLVED[solved.value](e) && (!hops.value || e.hops === Number(hops.value)) && (!text || holds(e, text)));
    if (order.value === "regret") shown.sort((a, b) => (b.regret ?? -1) - (a.regret ?? -1)); // stable: equal ones stay as in the log
    list.replaceChildren();
    draw();
  }
  function draw() {
    const from = list.children.length, of = shown.length === episodes.length ? "" : ` found, of ${episodes.length}`;
    list.append(...shown.slice(from, from + PAGE).map((e) => episodeItem(section, e)));
    status.textContent = `${list.children.length} of ${shown.length}${of} episodes`;
    more.hidden = list.children.length === shown.length;
  }

  const part = element("section", "", element("h2", "", section.title), noteList(section.notes), words.regret ? element("p", "regret", `Regret: ${words.regret}`) : null,
    element("div", "bar", labelled("Solved", solved), counts.length > 1 ? labelled(words.hops, hops) : null, labelled("Order", order), labelled("Search in all texts", search, "find")),
    element("div", "pager", status, open, shut), list, more);
  part.dataset.kind = section.kind;
  renew();
  return part;
}

// The keys j and k go to the next and the previous episode; Enter opens it.
document.addEventListener("keydown", (event) => {
  const by = { j: 1, k: -1 }[event.key];
  if (!by || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const every = [...document.querySelectorAll("details.episode > summary")], own = event.target.closest("details.episode");
  every[own ? every.indexOf(own.firstChild) + by : 0]?.focus();
});

const { about, runs, sections } = JSON.parse(document.getElementById("data").textContent);
document.getElementById("about").textContent = about;
document.getElementById("main").append(curveSection(runs), ...sections.map(episodeSection));
