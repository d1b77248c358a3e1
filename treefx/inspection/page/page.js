"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const short = (n) => {
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (n >= size) return (n / size).toFixed(1) + " " + unit;
  return String(n);
};

// Rollout tree: x is the depth in tokens, y the rows. Built as markup, with numbers only; texts are set later.
function drawTree(zoom) {
  const box = byId("tree"), forest = data.forest;
  if (!forest || !forest.nodes.length) {
    box.textContent = "The trie of the last call is gone, or it had none.";
    return;
  }
  const nodes = forest.nodes, children = nodes.map(() => []), roots = [];
  nodes.forEach((node, i) => (node.parent < 0 ? roots : children[node.parent]).push(i));
  const lanes = nodes.map(() => 1), top = nodes.map(() => 0);
  for (let i = nodes.length - 1; i >= 0; i--)
    if (children[i].length) lanes[i] = children[i].reduce((sum, child) => sum + lanes[child], 0);
  let next = 0;
  for (const root of roots) { top[root] = next; next += lanes[root]; }
  nodes.forEach((_, i) => {
    let place = top[i];
    for (const child of children[i]) { top[child] = place; place += lanes[child]; }
  });
  const deepest = Math.max(...nodes.map((node) => node.depth + node.tokens));
  const width = 1150 * zoom, scale = (width - 4) / deepest;
  const lane = Math.max(3, Math.min(24, 420 / next)), height = Math.ceil(next * lane) + 2;
  const most = Math.max(...nodes.map((node) => node.rows.length));
  const parts = nodes.map((node, i) => {
    const w = Math.max(1, node.tokens * scale), h = lanes[i] * lane, opacity = 0.25 + 0.75 * node.rows.length / most;
    const x = node.depth * scale, y = top[i] * lane, visible = w > 40 && h > 11;
    const on = opacity > 0.6 ? "on" : "";
    const text = visible ? `<text class="${on}" x="${x + 4}" y="${y + h / 2 + 4}">${node.tokens}</text>` : "";
    return `<rect class="run" tabindex="0" role="button" data-run="${i}" x="${x}" y="${y}" width="${w}" height="${h}"` +
      ` fill-opacity="${opacity}"><title></title></rect>${text}`;
  });
  box.innerHTML = `<svg width="${width}" height="${height}" role="img" aria-label="rollout tree">${parts.join("")}</svg>`;
  for (const rect of box.querySelectorAll("rect")) {
    const node = nodes[rect.dataset.run];
    const text = `${node.tokens} tokens from depth ${node.depth}, ${node.rows.length} rows\n${node.text}`;
    rect.firstElementChild.textContent = text;
    rect.setAttribute("aria-label", text);
    const show = () => showRun(Number(rect.dataset.run), rect);
    rect.onclick = show;
    rect.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(); } };
  }
  if (forest.left_out) box.append(make("p", "hint", `${forest.left_out} further runs are left out.`));
}
function showRun(i, rect) {
  const node = data.forest.nodes[i], panel = byId("tree-detail");
  for (const other of document.querySelectorAll("rect.chosen")) other.classList.remove("chosen");
  rect.classList.add("chosen");
  const edges = data.forest.nodes.filter((other) => other.parent === i)
    .map((child) => `  -> run at token ${child.start}: ${child.rows.length} rows`).join("\n");
  panel.hidden = false;
  panel.textContent = `run of ${node.tokens} tokens, packed ${node.start} to ${node.start + node.tokens - 1}, ` +
    `depth ${node.depth}\nrows: ${node.rows.join(", ")}\nedges out of it:\n${edges || "  none"}\ntext: ${node.text}`;
}
byId("zoom").oninput = (event) => drawTree(Number(event.target.value));

// Modules: rows are made when the module around them is opened; equal layers are shown once.
const modules = data.modules, inside = new Map();
for (const item of modules) {
  if (item.path === "") continue;
  if (item.folded.length && item.folded[0] !== item.path) continue;
  let around = item.path;
  do around = around.includes(".") ? around.slice(0, around.lastIndexOf(".")) : "";
  while (around !== "" && !modules.some((other) => other.path === around));
  if (!inside.has(around)) inside.set(around, []);
  inside.get(around).push(item);
}
function moduleRow(item, kind, whole) {
  const row = make("div", "module"), name = make("span"), bars = make("span"), figures = make("small");
  const times = item.folded.length > 1 ? ` (x ${item.folded.length})` : "";
  name.append(make("b", "", (item.path.split(".").pop() || "model") + times), make("small", "", ` ${item.kind}`));
  for (const when of ["before", "after"]) {
    const bar = make("i", when);
    bar.style.width = `${100 * item[`${kind}_${when}`] / (whole || 1)}%`;
    bars.append(bar);
  }
  const rows = item.row ? `, ${item.row} on rows` : "";
  figures.textContent = `${short(item[kind + "_before"])} -> ${short(item[kind + "_after"])}${rows}`;
  figures.title = item.codes.join(" ");
  row.append(name, bars, figures);
  return row;
}
function moduleBox(item, kind, whole, isOpen) {
  const below = inside.get(item.path) || [];
  if (!below.length) return moduleRow(item, kind, whole);
  const box = make("details"), head = make("summary"), body = make("div");
  head.append(moduleRow(item, kind, whole));
  box.append(head, body);
  box.ontoggle = () => {
    if (box.open && !body.childElementCount)
      for (const child of below) body.append(moduleBox(child, kind, whole, below.length === 1));
  };
  box.open = isOpen;
  box.ontoggle(); // the browser's own event comes after the page was drawn
  return box;
}
function drawModules() {
  const root = modules.find((item) => item.path === ""), kind = byId("overlay").value;
  byId("modules").replaceChildren();
  if (root) byId("modules").append(moduleBox(root, kind, root[kind + "_before"], true));
}
byId("overlay").onchange = drawModules;

// Graphs. A node is [name, op, inputs, type, module, line, sources, mark, code]; modules and lines are numbers.
const NAME = 0, OP = 1, INPUTS = 2, TYPE = 3, MODULE = 4, LINE = 5, SOURCES = 6, MARK = 7, CODE = 8;
const stages = Object.keys(data.nodes), index = {}, images = {}, users = {};
for (const stage of stages) {
  index[stage] = new Map(data.nodes[stage].map((node) => [node[NAME], node]));
  users[stage] = new Map();
  for (const node of data.nodes[stage])
    for (const input of node[INPUTS]) {
      if (!users[stage].has(input)) users[stage].set(input, []);
      users[stage].get(input).push(node[NAME]);
    }
}
const before = { rewritten: "captured", forward: "rewritten", backward: "forward" };
for (const stage of stages) {
  const source = before[stage];
  if (!source || !index[source]) continue;
  for (const node of data.nodes[stage])
    for (const name of node[SOURCES]) {
      const key = `${source} ${name} ${stage}`;
      (images[key] = images[key] || []).push(node[NAME]);
    }
}
function partnersOf(stage, name, other) {
  const node = index[stage].get(name);
  if (!node) return [];
  if (before[stage] === other) return node[SOURCES];
  return images[`${stage} ${name} ${other}`] || [];
}
const pairs = [["captured", "rewritten"], ["rewritten", "forward"], ["forward", "backward"]]
  .filter(([a, b]) => index[a] && index[b]);
if (!pairs.length) pairs.push([stages[0], null]);
for (const pair of pairs) byId("pair").append(make("option", "", pair.filter(Boolean).join(" and ")));
let shown = pairs[0];
const sides = {};
const groupOf = (node) => {
  const path = data.modules_of[node[MODULE]], parts = path.split("."), at = parts.findIndex((part) => /^\d+$/.test(part));
  return at < 0 ? parts[0] : parts.slice(0, at + 1).join(".");
};
function nodeLine(stage, node) {
  const line = make("button", "node " + node[MARK]);
  line.dataset.stage = stage;
  line.dataset.name = node[NAME];
  line.append(make("b", "", node[NAME]), make("i", "", ` ${node[TYPE]} = `), make("u", "", node[OP]),
    document.createTextNode(`(${node[INPUTS].join(", ")})`));
  if (node[CODE]) line.append(make("em", "", node[CODE]));
  line.title = [data.modules_of[node[MODULE]], data.lines[node[LINE]]].filter(Boolean).join("\n");
  line.onmouseenter = line.onfocus = () => light(stage, node[NAME]);
  line.onclick = () => showNode(stage, node[NAME]);
  return line;
}
function drawSide(box, stage) {
  box.replaceChildren();
  if (!stage) return;
  box.append(make("h3", "", `${stage}: ${data.nodes[stage].length} nodes`));
  const groups = [];
  for (const node of data.nodes[stage]) {
    const group = groupOf(node), last = groups[groups.length - 1];
    if (last && last.name === group) last.nodes.push(node); else groups.push({ name: group, nodes: [node] });
  }
  sides[stage] = groups;
  for (const group of groups) {
    group.box = make("details");
    const head = make("summary", "", `${group.name || "outside of modules"} (${group.nodes.length})`), body = make("div");
    const codes = [...new Set(group.nodes.map((node) => node[CODE]).filter((code) => code && code < "TFX150"))];
    if (codes.length) head.append(make("em", "", " " + codes.join(" ")));
    group.box.append(head, body);
    group.fill = () => { if (!body.childElementCount) body.append(...group.nodes.map((n) => nodeLine(stage, n))); };
    group.box.ontoggle = () => { if (group.box.open) group.fill(); };
    box.append(group.box);
  }
  if (groups.length === 1) groups[0].box.open = true;
}
const rendered = (stage, name) =>
  [...document.querySelectorAll(`.side .node[data-stage="${stage}"]`)].filter((line) => line.dataset.name === name);
function light(stage, name) {
  for (const line of document.querySelectorAll(".lit")) line.classList.remove("lit");
  for (const line of rendered(stage, name)) line.classList.add("lit");
  for (const other of shown)
    if (other && other !== stage)
      for (const partner of partnersOf(stage, name, other))
        for (const line of rendered(other, partner)) line.classList.add("lit");
}
function reveal(stage, name) {
  if (!shown.includes(stage)) {
    byId("pair").selectedIndex = pairs.findIndex((pair) => pair.includes(stage));
    drawGraphs();
  }
  const group = sides[stage].find((item) => item.nodes.some((node) => node[NAME] === name));
  if (!group) return;
  group.box.open = true;
  group.fill();
  const line = rendered(stage, name)[0];
  if (line) line.scrollIntoView({ block: "nearest" });
}
function showNode(stage, name) {
  const node = index[stage].get(name), panel = byId("node-detail");
  reveal(stage, name);
  panel.replaceChildren();
  panel.hidden = false;
  panel.append(`${name} = ${node[OP]}(${node[INPUTS].join(", ")})  ${node[TYPE]}\n`);
  panel.append(`module: ${data.modules_of[node[MODULE]] || "none"}\nline: ${data.lines[node[LINE]] || "unknown"}\n`);
  const account = data.operators[name];
  if (stage === "captured" && account)
    panel.append(`runs: ${account[0]}${account[1] ? ` [${account[1]}] ${account[2]}` : ""}\n` +
      `FLOPs: ${short(account[3])} -> ${short(account[4])}\n`);
  const links = (label, where, names) => {
    if (!names.length) return;
    panel.append(`${label}: `);
    for (const other of names.slice(0, 40)) {
      const link = make("button", "", other);
      link.onclick = () => { showNode(where, other); light(where, other); };
      panel.append(link, " ");
    }
    panel.append("\n");
  };
  links("inputs", stage, node[INPUTS]);
  links("read by", stage, users[stage].get(name) || []);
  for (const other of stages) if (other !== stage) links(other, other, partnersOf(stage, name, other));
  for (const other of shown)
    if (other && other !== stage)
      for (const partner of partnersOf(stage, name, other).slice(0, 1)) reveal(other, partner);
  light(stage, name);
}
function drawGraphs() {
  shown = pairs[byId("pair").selectedIndex] || pairs[0];
  drawSide(byId("left"), shown[0]);
  drawSide(byId("right"), shown[1]);
}
byId("pair").onchange = drawGraphs;
const searchable = stages.map((stage) => [stage, data.nodes[stage].map((node) =>
  [node, [node[NAME], node[OP], node[TYPE], node[MARK], node[CODE], data.modules_of[node[MODULE]],
    data.lines[node[LINE]]].join("\n").toLowerCase()])]);
byId("search").oninput = (event) => {
  const wanted = event.target.value.toLowerCase(), results = byId("results");
  results.replaceChildren();
  results.hidden = !wanted;
  let found = 0;
  if (wanted)
    for (const [stage, items] of searchable)
      for (const [node, text] of items)
        if (text.includes(wanted) && found++ < 100) {
          const line = nodeLine(stage, node);
          line.prepend(make("i", "", `${stage}: `));
          results.append(line);
        }
  byId("found").textContent = wanted ? `${found} found${found > 100 ? ", 100 shown" : ""}` : "";
};

function drawPasses() {
  const longest = Math.max(...data.passes.map((item) => item.seconds), 1e-9);
  for (const item of data.passes) {
    const row = make("div", "pass"), bar = make("i");
    bar.style.width = `${100 * item.seconds / longest}%`;
    row.append(make("span", "", item.name), make("span", "", `${item.seconds.toFixed(3)} s`), bar);
    const box = make("details"), head = make("summary");
    head.append(row);
    const nodes = item.nodes_before ? `${item.nodes_before} -> ${item.nodes_after} nodes\n` : "";
    box.append(head, make("pre", "", nodes + (item.changes.join("\n") || "no operator changed")));
    byId("passes").append(box);
  }
}
function drawCalls() {
  const box = byId("calls"), calls = data.calls;
  if (!calls.length) { box.textContent = "No call was logged."; return; }
  const most = Math.max(...calls.map((call) => call.raw_tokens), 1), width = Math.max(6, Math.min(40, 1160 / calls.length));
  box.innerHTML = `<svg width="${width * calls.length + 4}" height="110" role="img" aria-label="calls">` + calls.map(
    (call, i) => {
      const raw = 100 * call.raw_tokens / most, ran = 100 * call.tokens / most, color = call.code ? "row" : "token";
      const place = `x="${i * width + 2}" width="${width - 2}"`;
      return `<g><title></title><rect ${place} y="${104 - raw}" height="${raw}" fill="var(--once)" opacity=".4"/>` +
        `<rect ${place} y="${104 - ran}" height="${ran}" fill="var(--${color})"/></g>`;
    }).join("") + "</svg>";
  box.querySelectorAll("g > title").forEach((title, i) => {
    const call = calls[i], seconds = call.seconds === null ? "" : `, ${(1000 * call.seconds).toFixed(1)} ms on the host`;
    title.textContent = `call ${call.number}: ${call.ran}, ${call.raw_tokens} -> ${call.tokens} tokens${seconds}` +
      `${call.compiles ? `, ${call.compiles} compilations` : ""}\n${call.code} ${call.reason}`;
  });
}
drawTree(1);
drawModules();
drawGraphs();
drawPasses();
drawCalls();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
