drawTree();
drawModules();
drawGraphs();
drawPasses();
drawMasks();
linkNodes();
drawCalls();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
