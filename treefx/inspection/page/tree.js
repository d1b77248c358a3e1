// Rollout tree: x is the depth in tokens, y the rows.
const runs = data.forest ? data.forest.nodes : [];
const below = runs.map(() => []), roots = [];
runs.forEach((run, i) => (run.parent < 0 ? roots : below[run.parent]).push(i));
const lanes = runs.map(() => 1), top_ = runs.map(() => 0);
for (let i = runs.length - 1; i >= 0; i--)
  if (below[i].length) lanes[i] = below[i].reduce((sum, child) => sum + lanes[child], 0);
let laneCount = 0;
for (const root of roots) { top_[root] = laneCount; laneCount += lanes[root]; }
runs.forEach((_, i) => {
  let place = top_[i];
  for (const child of below[i]) { top_[child] = place; place += lanes[child]; }
});
const parts = data.parts;
const partOf = (run) => parts.findIndex((intervals) => intervals.some(([a, b]) => a <= run.start && run.start < b));
// Keys that a query of a run sees: the tokens above it and itself, so that deep tokens cost more attention.
const keysSeen = (run) => run.depth + (run.tokens + 1) / 2;
const COLORS = {
  rows: {
    words: "rows through a run of tokens", of: (run) => run.rows.length,
    fill: (value, most) => ["var(--token)", 0.25 + 0.75 * value / most],
  },
  cost: {
    words: "keys that a query sees, the cost of attention per token", of: keysSeen,
    fill: (value, most) => ["var(--row)", 0.15 + 0.85 * value / most],
  },
  part: {
    words: "part of the plan", of: partOf,
    fill: (value) => (value < 0 ? ["var(--once)", 0.5] : [`hsl(${(value * 137) % 360} 60% 50%)`, 0.85]),
  },
};
if (!parts.length) byId("color").querySelector("[value=part]").disabled = true;

function runText(run) {
  return `${run.tokens} tokens from depth ${run.depth}, ${run.rows.length} rows\n${run.text}`;
}
function drawTree() {
  const box = byId("tree"), zoom = Number(byId("zoom").value), color = COLORS[byId("color").value];
  if (!runs.length) {
    box.textContent = "The trie of the last call is gone, or it had none.";
    return;
  }
  byId("tree-title").nextElementSibling.firstElementChild.textContent = color.words;
  const deepest = Math.max(...runs.map((run) => run.depth + run.tokens));
  const width = 1150 * zoom, scale = (width - 4) / deepest;
  const lane = Math.max(3, Math.min(24, 420 / laneCount)), height = Math.ceil(laneCount * lane) + 2;
  const most = Math.max(...runs.map(color.of), 1);
  const svg = draw("svg", { width, height, role: "group", "aria-label": "rollout tree" });
  runs.forEach((run, i) => {
    const w = Math.max(1, run.tokens * scale), h = lanes[i] * lane, x = run.depth * scale, y = top_[i] * lane;
    const [fill, opacity] = color.fill(color.of(run), most);
    svg.append(draw("rect", {
      class: "run", role: "button", tabindex: i ? -1 : 0, "data-run": i, x, y, width: w, height: h,
      style: `fill: ${fill}`, "fill-opacity": opacity, "aria-label": runText(run),
    }));
    if (w > 40 && h > 11)
      svg.append(draw("text", { class: opacity > 0.6 ? "on" : "", x: x + 4, y: y + h / 2 + 4 }, String(run.tokens)));
  });
  box.replaceChildren(svg);
  if (data.forest.left_out) box.append(make("p", "hint", `${data.forest.left_out} further runs are left out.`));
}
const runAt = (target) => (target.dataset && target.dataset.run !== undefined ? Number(target.dataset.run) : -1);
const rectOf = (i) => byId("tree").querySelector(`rect[data-run="${i}"]`);
function hoverRun(event) {
  const i = runAt(event.target);
  if (i < 0) return;
  const panel = byId("tree-hover");
  panel.textContent = cut(runText(runs[i]).replace(/\s+/g, " "), 400);
}
function showRun(i) {
  const run = runs[i], panel = byId("tree-detail"), rect = rectOf(i);
  for (const other of document.querySelectorAll("rect.chosen")) other.classList.remove("chosen");
  if (rect) rect.classList.add("chosen");
  const weight = (child) => (child.weight === null ? "" : `, weight ${Number(Number(child.weight).toPrecision(6))}`);
  const count = (run) => `${run.rows.length} row${run.rows.length === 1 ? "" : "s"}`;
  const edge = (child) => `  -> token ${child.start} (depth ${child.depth}): ${count(child)}` +
    ` (${cut(child.rows.join(", "), 60)})${weight(child)}`;
  const part = partOf(run), inPart = part < 0 ? "" : `, part ${part}`;
  panel.hidden = false;
  panel.textContent = `run of ${run.tokens} tokens, packed ${run.start} to ${run.start + run.tokens - 1}, ` +
    `depth ${run.depth}${inPart}\nrows: ${run.rows.join(", ")}\n` +
    (run.parent < 0 ? "a root\n" : `edge into it: ${count(run)}${weight(run)}\n`) +
    `edges out of it:\n${below[i].map((child) => edge(runs[child])).join("\n") || "  none"}\ntext: ${run.text}`;
}
function moveRun(i, key) {
  const around = runs[i].parent < 0 ? roots : below[runs[i].parent], at = around.indexOf(i);
  return { ArrowRight: below[i][0], ArrowLeft: runs[i].parent, ArrowDown: around[at + 1], ArrowUp: around[at - 1] }[key];
}
const treeBox = byId("tree");
treeBox.onmouseover = hoverRun;
treeBox.addEventListener("focusin", hoverRun);
treeBox.onclick = (event) => { if (runAt(event.target) >= 0) showRun(runAt(event.target)); };
treeBox.onkeydown = (event) => {
  const i = runAt(event.target);
  if (i < 0) return;
  if (event.key === "Enter" || event.key === " ") showRun(i);
  else {
    const other = moveRun(i, event.key), rect = other >= 0 ? rectOf(other) : null;
    if (!rect) return;
    rove(treeBox.querySelectorAll("rect.run[tabindex='0']"), rect);
    rect.focus();
  }
  event.preventDefault();
};
byId("zoom").oninput = byId("color").onchange = drawTree;
