// Passes on one line of time, each with its changes.
function drawPasses() {
  const all = data.passes.reduce((sum, item) => sum + Number(item.seconds), 0) || 1e-9;
  let start = 0;
  for (const item of data.passes) {
    const row = make("div", "pass"), line = make("span", "line"), bar = make("i");
    bar.style.left = `${100 * start / all}%`;
    bar.style.width = `${100 * item.seconds / all}%`;
    start += item.seconds;
    line.append(bar);
    const nodes = item.nodes_before ? `${item.nodes_before} -> ${item.nodes_after} nodes` : "";
    row.append(make("span", "", item.name), make("span", "", `${Number(item.seconds).toFixed(3)} s`), make("small", "", nodes), line);
    const box = make("details"), head = make("summary");
    head.append(row);
    box.append(head, make("pre", item.changes.length > 4 ? "columns" : "", item.changes.join("\n") || "no operator changed"));
    if (item.diff.length) {
      const text = make("pre", "diff");
      for (const change of item.diff) text.append(make("span", { "+": "added", "-": "removed", "@": "hint" }[change[0]], change));
      box.append(text);
    }
    byId("passes").append(box);
  }
}

// Masks: a square per cell, darker where more pairs of query and key are visible. Queries go down, keys to the right.
function drawMasks() {
  for (const canvas of document.querySelectorAll("canvas.mask")) {
    const mask = data.masks[Number(canvas.dataset.mask)];
    if (!mask) continue;
    const cells = mask.shades.length, size = Math.max(1, Math.floor(256 / Math.max(1, cells)));
    canvas.width = canvas.height = cells * size;
    const pen = canvas.getContext("2d");
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--token");
    mask.shades.forEach((row, y) => [...row].forEach((shade, x) => {
      pen.globalAlpha = Number(shade) / 9;
      pen.fillRect(x * size, y * size, size, size);
    }));
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMasks);

// Names of nodes in tables lead to the graph.
function linkNodes() {
  for (const row of document.querySelectorAll("#restoration tr"))
    for (const [cell, stage] of [[row.cells[0], "backward"], [row.cells[2], "rewritten"]])
      if (index.has(stage) && index.get(stage).has(cell.textContent)) {
        const link = linkTo(stage, cell.textContent), show = link.onclick;
        link.onclick = () => { show(); byId("pair").scrollIntoView(); };
        cell.replaceChildren(link);
      }
}

// Calls, the oldest first: grey bars are tokens of the rows, coloured bars are tokens that ran.
function callText(call) {
  const seconds = call.seconds === null ? "" : `, ${(1000 * call.seconds).toFixed(1)} ms on the host`;
  const compiles = call.compiles ? `, ${call.compiles} compilation${call.compiles > 1 ? "s" : ""}` : "";
  const reason = call.code ? `; ${call.code} ${call.reason}` : "";
  return `call ${call.number}: ${call.ran}, ${call.raw_tokens} -> ${call.tokens} tokens${seconds}${compiles}${reason}`;
}
function drawCalls() {
  const box = byId("calls"), calls = data.calls;
  if (!calls.length) { box.textContent = "No call was logged."; return; }
  const most = Math.max(...calls.map((call) => call.raw_tokens), 1), left = 70;
  const width = Math.max(6, Math.min(40, 1080 / calls.length));
  const svg = draw("svg", { width: left + width * calls.length + 4, height: 126, role: "group", "aria-label": "calls" });
  for (const [y, words] of [[10, `${short(most)} tokens`], [110, "0"]])
    svg.append(draw("text", { x: 0, y: y + 4 }, words), draw("line", { x1: left - 4, x2: left + width * calls.length, y1: y, y2: y, class: "axis" }));
  calls.forEach((call, i) => {
    const raw = 100 * call.raw_tokens / most, ran = 100 * call.tokens / most, color = call.code ? "row" : "token";
    const place = { x: left + i * width, width: width - 2 };
    const group = draw("g", { class: "call", tabindex: i ? -1 : 0, role: "img", "aria-label": callText(call), "data-call": i });
    group.append(draw("title", {}, callText(call)),
      draw("rect", { ...place, y: 10, height: 100, class: "catch" }),
      draw("rect", { ...place, y: 110 - raw, height: raw, style: "fill: var(--once)", opacity: 0.4 }),
      draw("rect", { ...place, y: 110 - ran, height: ran, style: `fill: var(--${color})` }));
    if (call.compiles) group.append(draw("circle", { cx: place.x + place.width / 2, cy: 118, r: 3, class: "compiled" }));
    svg.append(group);
  });
  box.replaceChildren(svg);
  const show = (event) => {
    const group = event.target.closest(".call");
    if (group) byId("call-detail").textContent = callText(calls[Number(group.dataset.call)]);
  };
  box.onmouseover = box.onclick = show;
  box.addEventListener("focusin", show);
  box.onkeydown = (event) => {
    const at = Number(event.target.dataset.call), next = { ArrowRight: at + 1, ArrowLeft: at - 1 }[event.key];
    const group = next === undefined ? null : box.querySelector(`[data-call="${next}"]`);
    if (!group) return;
    rove(box.querySelectorAll(".call[tabindex='0']"), group);
    group.focus();
    event.preventDefault();
  };
  byId("call-detail").textContent = callText(calls[calls.length - 1]);
}
