"use strict";
// Runs the scripts of a report's page without a browser: a document with no more than they use, and Vega's views.
// Standard input: {scripts, data, steps}; a step sets an element's value or a box of the legend, and causes its event.
// Printed: of the page at first and after each step the count of answers, the rows' texts, and what the charts show.
const vm = require("node:vm");
const { scripts, data, steps } = JSON.parse(require("node:fs").readFileSync(0, "utf8"));

const element = () => ({
  value: "", textContent: "", clientWidth: 600, children: [], dataset: {},
  append(...made) { this.children.push(...made); },
  replaceChildren(...made) { this.children = made; },
  addEventListener(event, act) { this[event] = act; },
  get tBodies() { return [this]; },
});
const elements = { data: { textContent: data }, which: { ...element(), value: "all" } };
const boxes = JSON.parse(data).series.map((_, place) => ({ checked: true, dataset: { series: place } }));
const views = [];
Object.assign(globalThis, {
  document: {
    createElement: element,
    documentElement: element(),
    getElementById: (id) => (elements[id] ??= element()),
    querySelectorAll: () => boxes,
  },
  window: element(),
  IntersectionObserver: class { observe() {} },
});
for (const script of scripts.slice(0, 2)) vm.runInThisContext(script);
globalThis.vegaEmbed = async (place, spec, options) => {
  const view = new vega.View(vega.parse(vegaLite.compile(spec, { config: options.config }).spec), { renderer: "none" });
  views.push(await view.runAsync());
  return { view };
};
for (const script of scripts.slice(3)) vm.runInThisContext(script);

const pause = () => new Promise((resolve) => setTimeout(resolve, 50));
const textOf = (made) => made.textContent + made.children.map(textOf).join("");

async function seen() {
  const charts = [];
  for (const view of views) {
    const svg = await view.toSVG();
    charts.push({ lines: (svg.match(/aria-roledescription="line mark"/g) ?? []).length, steps: view.scale("x").domain() });
  }
  return { count: elements.count?.textContent, rows: elements["answer-table"]?.children.map((row) => row.children.map(textOf)), charts };
}

(async () => {
  while (!document.documentElement.dataset.drawn) await pause();
  const shown = [await seen()];
  for (const { id, event, value, box } of steps) {
    if (box !== undefined) boxes[box].checked = value;
    else elements[id].value = value;
    elements[id][event]();
    await pause();
    shown.push(await seen());
  }
  console.log(JSON.stringify(shown));
})();
