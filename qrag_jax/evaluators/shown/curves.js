// Learning curves: one small chart a metric, all runs in it. Runs differ by colour and by marker.
const COLOURS = ["#0b4f9e", "#b34700", "#14602f", "#7b2d8b", "#9b1c1c", "#3d5a66", "#6b5900", "#a3195b"];
const MARKERS = ["circle", "square", "triangle", "diamond", "cross", "plus"];
const FIRST = [ // what is drawn first, where a run has it
  /^eval\/fact_em$/, /^eval\/fact_f1$/, /^eval\/return$/, /^eval\/fact_recall$/, /^eval\/em$/, /^eval\/f1$/, /^eval\/recall$/, /^eval\/reward$/,
  /^eval\/hop\d+\/all_gold$/, /^eval\/hop\d+\/ap$/, /^eval\/(ndcg|recall|rr)@\d+$/, /^train\/loss$/, /^train\/return$/, /^train\/mean_q$/, /^train\/entropy$/,
];
const SCORES = 4, STEPS = 2; // charts of evaluations and of training steps that are drawn at first, of each run
const BASELINES = [["untrained/", "before training", "6 4"], ["single_step/", "one look-up before training", "2 3"], ["original/", "original queries", "2 3"]];

function marker(kind, x, y, colour) {
  const r = 3.5, paths = {
    square: `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
    triangle: `M${x} ${y - r - 1}l${r + 1} ${2 * r}h${-2 * r - 2}z`,
    diamond: `M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z`,
    cross: `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`,
    plus: `M${x} ${y - r}v${2 * r}M${x - r} ${y}h${2 * r}`,
  };
  if (kind === "circle") return drawn("circle", { cx: x, cy: y, r, fill: colour });
  const open = kind === "cross" || kind === "plus";
  return drawn("path", { d: paths[kind], fill: open ? "none" : colour, stroke: colour, "stroke-width": open ? 2 : 0 });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function tickText(value, digits) {
  if (value !== 0 && (Math.abs(value) >= 1e5 || digits > 4)) return value.toExponential(1);
  return value.toFixed(digits);
}

function lines(runs, name) {
  const found = [];
  runs.forEach((run, place) => {
    const own = run.curves.find((each) => each.name === name);
    const colour = COLOURS[place % COLOURS.length], kind = MARKERS[place % MARKERS.length];
    if (own) found.push({ run: run.name, colour, kind, steps: own.steps, values: own.values, dash: "", told: "" });
    if (!own || !name.startsWith("eval/")) return;
    for (const [before, told, dash] of BASELINES) {
      const base = run.curves.find((each) => each.name === before + name.slice(5));
      if (!base) continue;
      const value = base.values[base.values.length - 1], ends = [own.steps[0], own.steps[own.steps.length - 1]];
      found.push({ run: run.name, colour, kind, steps: ends, values: [value, value], dash, told });
    }
  });
  return found;
}

function chart(runs, name) {
  const all = lines(runs, name), W = 420, H = 240, left = 52, right = 10, top = 10, bottom = 38;
  const xs = all.flatMap((each) => each.steps), ys = all.flatMap((each) => each.values);
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const isShare = name.startsWith("eval/") && y0 >= 0 && y1 <= 1;
  if (isShare) { y0 = 0; y1 = y1 > 0.5 ? 1 : Math.max(y1 * 1.15, 0.05); }
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= pad; y1 += pad; }
  const x = (v) => left + (v - x0) / (x1 - x0) * (W - left - right), y = (v) => H - bottom - (v - y0) / (y1 - y0) * (H - top - bottom);
  const title = `${name}: ${all.filter((each) => !each.dash).map((each) => `${each.run} from ${number(each.values[0])} to ${number(each.values[each.values.length - 1])}`).join("; ")}`;
  const svg = drawn("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  const up = ticks(y0, y1, 5), along = ticks(x0, x1, 5);
  for (const value of up.found) {
    svg.append(drawn("line", { x1: left, x2: W - right, y1: y(value), y2: y(value), stroke: "#e3e6ea" }));
    svg.append(drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, tickText(value, up.digits)));
  }
  for (const value of along.found) {
    svg.append(drawn("line", { x1: x(value), x2: x(value), y1: H - bottom, y2: H - bottom + 4, stroke: "#50565f" }));
    svg.append(drawn("text", { x: x(value), y: H - bottom + 17, "text-anchor": "middle" }, tickText(value, along.digits)));
  }
  svg.append(drawn("path", { d: `M${left} ${top}V${H - bottom}H${W - right}`, stroke: "#50565f", fill: "none" }));
  svg.append(drawn("text", { x: (left + W - right) / 2, y: H - 5, "text-anchor": "middle" }, "optimizer step"));
  for (const line of all) {
    const points = line.steps.map((step, i) => [x(step), y(line.values[i])]);
    const d = points.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    svg.append(drawn("path", { d, fill: "none", stroke: line.colour, "stroke-width": line.dash ? 1.3 : 2, "stroke-dasharray": line.dash || "none" }));
    if (line.dash) continue;
    const every = Math.max(1, Math.ceil(points.length / 8));
    points.forEach(([px, py], i) => { if (i % every === 0 || i === points.length - 1) svg.append(marker(line.kind, px, py, line.colour)); });
  }
  return element("figure", "", element("figcaption", "", name), svg);
}

function legend(runs, names) {
  const list = element("ul", "legend");
  runs.forEach((run, place) => {
    if (!run.curves.length) return;
    const colour = COLOURS[place % COLOURS.length], svg = drawn("svg", { viewBox: "0 0 46 14", "aria-hidden": "true" });
    svg.append(drawn("line", { x1: 2, x2: 44, y1: 7, y2: 7, stroke: colour, "stroke-width": 2 }), marker(MARKERS[place % MARKERS.length], 23, 7, colour));
    list.append(element("li", "", svg, run.system ? `${run.name} (${run.system})` : run.name));
  });
  for (const [before, told, dash] of BASELINES) {
    if (!names.some((each) => each.startsWith(before))) continue;
    const svg = drawn("svg", { viewBox: "0 0 46 14", "aria-hidden": "true" });
    svg.append(drawn("line", { x1: 2, x2: 44, y1: 7, y2: 7, stroke: "#1b1e24", "stroke-width": 1.3, "stroke-dasharray": dash }));
    list.append(element("li", "", svg, told));
  }
  return list;
}

function rank(name) {
  const found = FIRST.findIndex((each) => each.test(name));
  return found < 0 ? FIRST.length : found;
}

function curves(runs) {
  const names = [...new Set(runs.flatMap((run) => run.curves.map((each) => each.name)))];
  const notes = runs.flatMap((run) => run.notes.map((note) => runs.length > 1 ? `${run.name}: ${note}` : note));
  const part = element("section", "", element("h2", "", "Learning curves"), noteList(notes));
  if (!names.length) { if (!notes.length) part.append(element("p", "", "There are none.")); return part; }
  const basis = BASELINES.map(([before]) => before), own = names.filter((name) => !basis.some((before) => name.startsWith(before)));
  own.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  const charts = element("div", "charts");
  const show = (name) => { const made = chart(runs, name); charts.append(made); return made; };
  const has = (run, name) => run.curves.some((each) => each.name === name);
  const first = (run, before, most) => own.filter((name) => name.startsWith(before) && rank(name) < FIRST.length && has(run, name)).slice(0, most);
  const shown = own.filter((name) => runs.some((run) => first(run, "eval/", SCORES).includes(name) || first(run, "train/", STEPS).includes(name)));
  (shown.length ? shown : own.slice(0, SCORES + STEPS)).forEach(show);
  const more = choice([["", `add one of ${own.length}…`], ...own.map((name) => [name, name])], () => {
    if (more.value) show(more.value).scrollIntoView({ block: "nearest" });
    more.value = "";
  });
  part.append(legend(runs, names), charts, element("div", "bar more", labelled("Another curve", more)));
  return part;
}
