// Graphs. A node is [name, op, inputs, type, module, line, sources, mark, code]; modules and lines are numbers.
const NAME = 0, OP = 1, INPUTS = 2, TYPE = 3, MODULE = 4, LINE = 5, SOURCES = 6, MARK = 7, CODE = 8;
const stages = Object.keys(data.nodes), index = new Map(), users = new Map(), images = new Map();
for (const stage of stages) {
  const readers = new Map();
  index.set(stage, new Map(data.nodes[stage].map((node) => [node[NAME], node])));
  users.set(stage, readers);
  for (const node of data.nodes[stage])
    for (const input of node[INPUTS]) {
      if (!readers.has(input)) readers.set(input, []);
      readers.get(input).push(node[NAME]);
    }
}
const ORDER = ["captured", "rewritten", "forward", "backward"];
ORDER.forEach((stage, at) => {
  const source = ORDER[at - 1];
  if (!index.has(stage) || !index.has(source)) return;
  const made = new Map();
  images.set(stage, made);
  for (const node of data.nodes[stage])
    for (const name of node[SOURCES]) {
      if (!made.has(name)) made.set(name, []);
      made.get(name).push(node[NAME]);
    }
});
// The nodes of another stage that a node became or came from, through the stages between.
function partnersOf(stage, name, other) {
  const from = ORDER.indexOf(stage), to = ORDER.indexOf(other);
  let names = [name];
  if (from < 0 || to < 0) return [];
  for (let at = from; at < to; at++) names = names.flatMap((x) => (images.get(ORDER[at + 1]) || new Map()).get(x) || []);
  for (let at = from; at > to; at--) names = names.flatMap((x) => ((index.get(ORDER[at]) || new Map()).get(x) || [[]])[SOURCES] || []);
  return [...new Set(names)];
}
const pairs = [["captured", "rewritten"], ["rewritten", "forward"], ["forward", "backward"]]
  .filter(([a, b]) => index.has(a) && index.has(b));
if (!pairs.length) pairs.push([stages[0], null]);
for (const pair of pairs) byId("pair").append(make("option", "", pair.filter(Boolean).join(" and ")));
let shown = pairs[0];
const sides = new Map(), lineOf = new Map();
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
  sides.set(stage, groups);
  lineOf.set(stage, new Map());
  for (const group of groups) {
    group.box = make("details");
    const head = make("summary", "", `${group.name || "outside of modules"} (${group.nodes.length})`), body = make("div");
    const codes = [...new Set(group.nodes.map((node) => node[CODE]).filter((code) => code && code < "TFX150"))];
    if (codes.length) head.append(make("em", "", " " + codes.join(" ")));
    group.box.append(head, body);
    group.fill = () => {
      if (body.childElementCount) return;
      for (const node of group.nodes) {
        const line = nodeLine(stage, node);
        lineOf.get(stage).set(node[NAME], line);
        body.append(line);
      }
    };
    group.box.ontoggle = () => { if (group.box.open) group.fill(); };
    box.append(group.box);
  }
  if (groups.length === 1) groups[0].box.open = true;
}
let lit = [];
function light(stage, name) {
  for (const line of lit) line.classList.remove("lit");
  lit = [];
  const words = [`${stage}: ${name}`];
  for (const other of stages) {
    const names = other === stage ? [name] : partnersOf(stage, name, other);
    if (other !== stage && names.length) words.push(`${other}: ${cut(names.join(", "), 160)}`);
    if (shown.includes(other))
      for (const partner of names) {
        const line = (lineOf.get(other) || new Map()).get(partner);
        if (line) { line.classList.add("lit"); lit.push(line); }
      }
  }
  byId("partners").textContent = words.join("  ·  ");
}
function reveal(stage, name) {
  if (!shown.includes(stage)) {
    byId("pair").selectedIndex = pairs.findIndex((pair) => pair.includes(stage));
    drawGraphs();
  }
  const group = (sides.get(stage) || []).find((item) => item.nodes.some((node) => node[NAME] === name));
  if (!group) return;
  group.box.open = true;
  group.fill();
  const line = lineOf.get(stage).get(name), side = line && line.closest(".side");
  if (line) side.scrollTop += line.getBoundingClientRect().top - side.getBoundingClientRect().top - side.clientHeight / 3;
}
function showNode(stage, name) {
  const node = (index.get(stage) || new Map()).get(name), panel = byId("node-detail");
  if (!node) return;
  reveal(stage, name);
  panel.replaceChildren();
  panel.hidden = false;
  panel.append(`${name} = ${node[OP]}(${node[INPUTS].join(", ")})  ${node[TYPE]}\n`);
  panel.append(`module: ${data.modules_of[node[MODULE]] || "none"}\nline: ${data.lines[node[LINE]] || "unknown"}\n`);
  for (const origin of stage === "captured" ? [name] : partnersOf(stage, name, "captured").slice(0, 1)) {
    const account = Object.hasOwn(data.operators, origin) ? data.operators[origin] : null;
    if (account)
      panel.append(`runs: ${RAN[account[0]] || account[0]}${account[1] ? ` [${account[1]}] ${account[2]}` : ""}\n` +
        `FLOPs: ${short(account[3])} -> ${short(account[4])}\n`);
  }
  const links = (label, where, names) => {
    if (!names.length) return;
    panel.append(`${label}: `);
    for (const other of names.slice(0, 40)) panel.append(linkTo(where, other), " ");
    panel.append("\n");
  };
  links("inputs", stage, node[INPUTS]);
  links("read by", stage, users.get(stage).get(name) || []);
  for (const other of stages) if (other !== stage) links(other, other, partnersOf(stage, name, other));
  for (const other of shown)
    if (other && other !== stage)
      for (const partner of partnersOf(stage, name, other).slice(0, 1)) reveal(other, partner);
  light(stage, name);
  drawNeighbourhood(stage, name);
}
const RAN = { token: "once per distinct token", batch: "once for the batch", row: "once per row", none: "not at all" };
function linkTo(stage, name) {
  const link = make("button", "link", name);
  link.onclick = () => showNode(stage, name);
  return link;
}
function drawGraphs() {
  shown = pairs[byId("pair").selectedIndex] || pairs[0];
  lit = [];
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
// Keys: "/" searches, arrows walk along lines that are on the screen, Escape leaves the results.
document.addEventListener("keydown", (event) => {
  const target = event.target, isText = target.matches("input, select, textarea");
  if (event.key === "/" && !isText) {
    byId("search").focus();
    event.preventDefault();
  } else if (event.key === "Escape" && target.closest("#results, #search")) {
    byId("search").value = "";
    byId("search").oninput({ target: byId("search") });
    byId("search").focus();
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && target.closest(".side, #results, #search")) {
    const box = target.closest(".side") || byId("results");
    const stops = [...box.querySelectorAll(".node, summary")].filter((item) => item.offsetParent !== null);
    const next = stops[stops.indexOf(target) + (event.key === "ArrowDown" ? 1 : -1)];
    if (next) next.focus();
    else if (event.key === "ArrowUp" && box.id === "results") byId("search").focus();
    event.preventDefault();
  }
});
