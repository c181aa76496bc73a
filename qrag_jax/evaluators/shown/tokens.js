// Episodes of a token policy: turns, what is trained, log-probabilities, what tools gave.
function tokenSpan(section, at, kind, logProb) {
  const [id, text] = section.tokens[at];
  const made = element("span", `token ${kind}`, text ? text.replaceAll("\n", "↵\n") : "∅");
  made.title = `id ${id}`;
  if (logProb !== undefined) {
    made.title += `, log-prob ${logProb.toFixed(4)}, p ${Math.exp(logProb).toFixed(4)}`;
    made.append(element("sub", "", logProb.toFixed(2)));
  }
  return made;
}

function turnList(section, episode) {
  const kind = episode.trains ? "trained" : "sampled", part = element("div", "turns"), numbered = [];
  episode.turns.forEach((turn, place) => {
    const source = place ? "tool result" : "prompt", cut = turn.finish === "stop" ? "" : ", cut off";
    const weights = turn.version ? `, weights ${turn.version}` : "";
    part.append(
      element("h4", "", `${source}, ${turn.observed.length} tokens, observed: not trained`),
      element("pre", place ? "tool" : "prompt", ...turn.observed.map((at) => tokenSpan(section, at, "observed"))),
      element("h4", "", `turn ${place + 1} of the model, ${turn.sampled.length} tokens, ${kind === "trained" ? "sampled and trained" : "sampled, not trained"}${cut}${weights}`),
    );
    const said = element("pre", "model", ...turn.sampled.map((at, i) => tokenSpan(section, at, kind, turn.log_probs[i])));
    numbered.push(said);
    part.append(said);
  });
  const tool = button("Show log-probabilities", () => {
    const shown = numbered.map((each) => each.classList.toggle("with-numbers")).some(Boolean);
    tool.setAttribute("aria-pressed", String(shown));
  });
  tool.setAttribute("aria-pressed", "false");
  return element("div", "", element("p", "tools", tool), part);
}

function scoreTable(parts) {
  const names = Object.keys(parts);
  if (!names.length) return null;
  return element("table", "",
    element("tr", "", ...names.map((name) => { const th = element("th", "", name); th.scope = "col"; return th; })),
    element("tr", "", ...names.map((name) => element("td", "", number(parts[name])))));
}

function tokenBody(section, episode) {
  const before = episode.before;
  const part = element("div", "", scoreTable(episode.parts), turnList(section, episode));
  if (!before) return part;
  const inner = element("details", "", element("summary", "", `Before training: ${before.score === null ? "no reward" : `reward ${number(before.score)}`}, ${before.answered || "(no answer)"}`));
  inner.addEventListener("toggle", () => {
    if (inner.open && inner.children.length === 1) inner.append(scoreTable(before.parts) || "", turnList(section, before));
  });
  part.append(element("h3", "", "What would have been done before training"), inner);
  return part;
}
