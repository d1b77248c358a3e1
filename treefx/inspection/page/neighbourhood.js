// Inputs and readers of a node, two steps each way, drawn by dagre.
const STEPS = 2, MOST_DRAWN = 40, BOX_HEIGHT = 34;
function around(stage, name) {
  const found = new Set([name]);
  let left = 0;
  const walk = (next) => {
    let edge = [name];
    for (let step = 0; step < STEPS; step++) {
      const names = [...new Set(edge.flatMap(next))].filter((item) => index.get(stage).has(item));
      edge = names.filter((item) => found.has(item) || (found.size < MOST_DRAWN ? found.add(item) : (left++, false)));
    }
  };
  walk((item) => index.get(stage).get(item)[INPUTS]);
  walk((item) => users.get(stage).get(item) || []);
  return [[...found], left];
}
function drawNeighbourhood(stage, name) {
  const [names, left] = around(stage, name), box = byId("neighbourhood"), number = new Map(names.map((x, i) => [x, i]));
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 26, marginx: 6, marginy: 6 });
  graph.setDefaultEdgeLabel(() => ({}));
  const labels = names.map((item) => [cut(item, 26), cut(`${index.get(stage).get(item)[OP]} ${index.get(stage).get(item)[TYPE]}`, 30)]);
  labels.forEach(([a, b], i) => graph.setNode(String(i), { width: 14 + 6.7 * Math.max(a.length, b.length), height: BOX_HEIGHT }));
  names.forEach((item, i) => {
    for (const input of new Set(index.get(stage).get(item)[INPUTS]))
      if (number.has(input)) graph.setEdge(String(number.get(input)), String(i));
  });
  dagre.layout(graph);
  // Edges may bend outside of the box that dagre computes from nodes alone.
  const bends = graph.edges().flatMap((edge) => graph.edge(edge).points.map((point) => point.x));
  const { width: wide, height } = graph.graph(), left_ = Math.min(0, ...bends) - 4, right = Math.max(wide, ...bends) + 4;
  const svg = draw("svg", {
    width: right - left_, height, viewBox: `${left_} 0 ${right - left_} ${height}`, role: "group",
    "aria-label": `neighbourhood of ${name}`,
  });
  const arrow = draw("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
  arrow.append(draw("path", { d: "M0 0L8 4L0 8z", class: "head" }));
  svg.append(arrow);
  for (const edge of graph.edges()) {
    const points = graph.edge(edge).points.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
    svg.append(draw("polyline", { points, class: "edge", "marker-end": "url(#arrow)" }));
  }
  names.forEach((item, i) => {
    const place = graph.node(String(i)), [a, b] = labels[i], node = index.get(stage).get(item);
    const group = draw("g", {
      class: `near ${node[MARK]}${item === name ? " chosen" : ""}`, tabindex: 0, role: "button", "aria-label": `${item} ${node[OP]}`,
      transform: `translate(${(place.x - place.width / 2).toFixed(1)} ${(place.y - BOX_HEIGHT / 2).toFixed(1)})`,
    });
    group.append(draw("title", {}, `${item} = ${node[OP]} ${node[TYPE]}`),
      draw("rect", { width: place.width, height: BOX_HEIGHT, rx: 4 }),
      draw("text", { x: 7, y: 14, class: "name" }, a), draw("text", { x: 7, y: 28 }, b));
    group.dataset.name = item;
    group.onmouseenter = () => light(stage, item);
    group.onclick = () => showNode(stage, item);
    group.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      showNode(stage, item);
      const same = box.querySelector(".chosen");
      if (same) same.focus();
    };
    svg.append(group);
  });
  box.hidden = false;
  const more = left ? `; ${left} further ones are left out` : "";
  box.replaceChildren(make("p", "hint", `${stage}: inputs and readers of ${name}, two steps each way${more}`), svg);
  const chosen = graph.node("0");
  box.scrollLeft = chosen.x - left_ - box.clientWidth / 2;
}
