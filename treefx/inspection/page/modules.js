// Modules: rows are made when the module around them is opened; equal layers are shown once.
const modules = data.modules, inside = new Map(), paths = new Set(modules.map((item) => item.path));
for (const item of modules) {
  if (item.path === "") continue;
  if (item.folded.length && item.folded[0] !== item.path) continue;
  let around = item.path;
  do around = around.includes(".") ? around.slice(0, around.lastIndexOf(".")) : "";
  while (around !== "" && !paths.has(around));
  if (!inside.has(around)) inside.set(around, []);
  inside.get(around).push(item);
}
const milliseconds = (seconds) => `${(1000 * seconds).toPrecision(3)} ms`;
const isTimed = modules.some((item) => item.seconds_before > 0);
byId("timed").textContent = isTimed ? "Times: one operator at a time as in eager mode, so without fusion."
  : "treefx.explain(model, batch, timed=True) measures times.";
byId("overlay").querySelector("[value=seconds]").disabled = !isTimed;
function moduleRow(item, kind, whole) {
  const row = make("div", "module"), name = make("span"), bars = make("span"), figures = make("small");
  const times = item.folded.length > 1 ? ` (x ${item.folded.length})` : "";
  name.append(make("b", "", (item.path.split(".").pop() || "model") + times), make("small", "", ` ${item.kind}`));
  for (const when of ["before", "after"]) {
    const bar = make("i", when);
    bar.style.width = `${Math.min(100, 100 * item[`${kind}_${when}`] / (whole || 1))}%`;
    bars.append(bar);
  }
  const rows = item.row ? `, ${item.row} on rows` : "";
  const write = kind === "seconds" ? milliseconds : short;
  figures.textContent = `${write(item[kind + "_before"])} -> ${write(item[kind + "_after"])}${rows}`;
  figures.title = item.codes.join(" ");
  row.append(name, bars, figures);
  return row;
}
function moduleBox(item, kind, whole, isOpen) {
  const children = inside.get(item.path) || [];
  if (!children.length) return moduleRow(item, kind, whole);
  const box = make("details", "box"), head = make("summary"), body = make("div");
  head.append(moduleRow(item, kind, whole));
  box.append(head, body);
  const fill = () => {
    if (box.open && !body.childElementCount)
      for (const child of children) body.append(moduleBox(child, kind, whole, children.length <= 2));
  };
  box.ontoggle = fill;
  box.open = isOpen;
  fill(); // the browser's own event comes after the page was drawn
  return box;
}
function drawModules() {
  const root = modules.find((item) => item.path === ""), kind = byId("overlay").value;
  byId("modules").replaceChildren();
  if (root) byId("modules").append(moduleBox(root, kind, root[kind + "_before"], true));
}
byId("overlay").onchange = drawModules;
