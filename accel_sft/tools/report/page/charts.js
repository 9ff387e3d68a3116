"use strict";
// Draws the charts of the page, and ties them to the list of runs and to the range of steps.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const views = new Map(); // the element of a chart -> its Vega view
  const drawn = new Set(); // charts that are drawn
  const range = { low: null, high: null };

  const series = () =>
    [...document.querySelectorAll("#legend input")].filter((box) => box.checked).map((box) => Number(box.dataset.series));

  function rowsOf(chart) {
    if (chart.kind === "rows") return chart.rows;
    return chart.curves.flatMap((curve, line) => {
      const run = data.runs[curve.run];
      return curve.steps.map((step, place) => ({ run: run.name, series: run.series, line, step, value: curve.values[place] }));
    });
  }

  async function draw(chart) {
    const place = byId(chart.id);
    if (place.clientWidth === 0 || drawn.has(chart)) return; // folded, or done
    drawn.add(chart);
    const spec = { ...chart.spec, datasets: { rows: rowsOf(chart) } };
    const options = {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, config: data.config,
      tooltip: { disableDefaultStyle: true },
    };
    try {
      const { view } = await vegaEmbed(place, spec, options);
      view.logLevel(vega.Error); // a range without points is nothing to warn of
      views.set(place, view);
      if (chart.kind === "curves") listen(place, view);
      await update(view);
    } catch (error) {
      console.error(chart.title, error);
      place.className = "chart broken";
      place.textContent = `This chart cannot be drawn: ${error.message}`;
    }
  }

  // A drag over a chart selects a range, which all curves then show.
  function listen(place, view) {
    let selected = null;
    view.addSignalListener("brush", (_, value) => { if (value.step) selected = value.step; });
    place.onpointerdown = () => {
      selected = null;
      window.addEventListener("pointerup", () => setTimeout(() => {
        if (selected && selected[1] > selected[0]) zoom(Math.min(...selected), Math.max(...selected));
      }), { once: true });
    };
  }

  async function update(view) {
    const known = view.getState().signals;
    if ("shown" in known) view.signal("shown", series());
    if ("low" in known) view.signal("low", range.low).signal("high", range.high);
    await view.resize().runAsync(); // the labels may be wider now
  }

  const updateAll = () => Promise.all([...views.values()].map(update));

  function zoom(low, high) {
    range.low = low === null ? null : Math.floor(low);
    range.high = high === null ? null : Math.ceil(high);
    byId("low").value = range.low ?? "";
    byId("high").value = range.high ?? "";
    updateAll();
  }

  // Charts are drawn one after the other once they come near the screen, and all of them for paper.
  let queue = Promise.resolve();
  const enqueue = (chart) => { queue = queue.then(() => draw(chart)); return queue; };
  const chartOf = new Map(data.charts.map((chart) => [byId(chart.id), chart]));
  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) enqueue(chartOf.get(entry.target));
  }, { rootMargin: "800px" });
  const drawAll = () => Promise.all(data.charts.map(enqueue));

  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  const tick = (checked) => {
    for (const box of document.querySelectorAll("#legend input")) box.checked = checked;
    updateAll();
  };
  byId("legend").addEventListener("change", updateAll);
  byId("all").addEventListener("click", () => tick(true));
  byId("none").addEventListener("click", () => tick(false));
  if (byId("low")) {
    for (const id of ["low", "high"]) {
      byId(id).addEventListener("change", () => {
        [range.low, range.high] = [number("low"), number("high")];
        updateAll();
      });
    }
    byId("whole").addEventListener("click", () => zoom(null, null));
  }
  window.addEventListener("beforeprint", drawAll);
  for (const place of chartOf.keys()) nearby.observe(place);
  // Charts off the screen are drawn later, while the page is idle.
  setTimeout(() => drawAll().then(() => { document.documentElement.dataset.drawn = views.size; }), 500);
})();
