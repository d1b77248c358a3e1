"""The page that ``inspection_html`` fills in."""

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>treefx: inspection</title>
<style>
:root {
  color-scheme: light dark;
  --back: #ffffff; --text: #1d2430; --faint: #667085; --line: #dfe3ea; --panel: #f5f7fa; --accent: #2f6fde;
  --restore: #ffe3c2; --attention: #d5ecd9; --expand: #fbd9df;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171c; --text: #dde3ec; --faint: #8d97a8; --line: #2c333e; --panel: #1c2129; --accent: #7aa7f5;
    --restore: #5a3b12; --attention: #1d4529; --expand: #572530;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 16px; }
h2 { font-size: 17px; margin: 32px 0 8px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
h3 { font: 600 13px ui-monospace, monospace; margin: 12px 0 4px; }
pre, ol, td, input { font: 12.5px/1.55 ui-monospace, monospace; }
pre { background: var(--panel); border-radius: 6px; padding: 10px 14px; margin: 0; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--faint); }
th, td { padding: 3px 16px 3px 0; vertical-align: top; overflow-wrap: anywhere; }
td.n { text-align: right; white-space: nowrap; }
td.bar { width: 70%; }
td.bar i { display: block; height: 12px; margin-top: 4px; border-radius: 3px; background: var(--accent); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px;
  margin-bottom: 16px; }
.figures div { background: var(--panel); border-radius: 6px; padding: 10px 14px; color: var(--faint); }
.figures b { display: block; font-size: 21px; color: var(--text); }
.changes { columns: 250px; margin: 0; }
code { display: block; font: 12.5px/1.55 ui-monospace, monospace; }
.tools { position: sticky; top: 0; background: var(--back); padding: 8px 0; display: flex; gap: 6px;
  flex-wrap: wrap; }
button, input { border: 1px solid var(--line); border-radius: 6px; background: var(--panel); color: inherit;
  padding: 5px 11px; }
.restore { background: var(--restore); }
.attention { background: var(--attention); }
.expand { background: var(--expand); }
button { font: inherit; cursor: pointer; margin-right: 4px; }
button small { color: var(--faint); }
button[aria-selected="true"] { border-color: var(--accent); box-shadow: inset 0 -2px var(--accent); }
input { flex: 1; min-width: 180px; }
.tools output { align-self: center; color: var(--faint); min-width: 7em; text-align: right; }
ol { margin: 8px 0; padding: 0; list-style: none; overflow-x: auto; }
li { padding: 1px 6px; white-space: nowrap; border-radius: 3px; width: max-content; min-width: 100%; }
li:hover { outline: 1px solid var(--accent); }
li b { font-weight: 600; }
li i { color: var(--faint); font-style: normal; margin-left: 8px; }
li u { text-decoration: none; color: var(--accent); }
li.placeholder, li.output, li.get_attr { opacity: .75; }
[hidden] { display: none; }
</style>
</head>
<body>
<h1>What treefx did</h1>
<div class="figures">$figures</div>
<pre>$summary</pre>
$earlier
<h2>Seconds per pass</h2>
$seconds
<h2>Expansions</h2>
$expansions
<h2>Attention</h2>
$kernels
<h2>Operators, captured (traced to ATen) and rewritten</h2>
<p class="changes">$changes</p>
<h2>Graphs</h2>
<div class="tools"><span role="tablist">$tabs</span>
<input type="search" placeholder="search nodes, operators, shapes, lines" aria-label="search">
<output></output></div>
$graphs
<script>
const box = document.querySelector("input"), output = document.querySelector("output");
const shown = () => document.querySelector("section:not([hidden])");
function filter() {
  const wanted = box.value.toLowerCase(), lines = shown().querySelectorAll("li");
  let found = 0;
  for (const line of lines) {
    const text = (line.textContent + line.title + line.className).toLowerCase();
    line.hidden = !text.includes(wanted);
    found += !line.hidden;
  }
  output.textContent = found + " of " + lines.length;
}
for (const tab of document.querySelectorAll("[data-stage]")) tab.onclick = () => {
  for (const other of document.querySelectorAll("[data-stage]")) {
    other.setAttribute("aria-selected", other === tab);
    document.getElementById(other.dataset.stage).hidden = other !== tab;
  }
  filter();
};
for (const mark of document.querySelectorAll("[data-kind]")) mark.onclick = () => {
  const wanted = mark.textContent.replace(/^[0-9]+ /, "");
  box.value = box.value === wanted ? "" : wanted;
  filter();
};
box.oninput = filter;
filter();
</script>
</body>
</html>
"""
