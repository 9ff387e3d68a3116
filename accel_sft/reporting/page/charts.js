"use strict";
// Draws the charts of the page, and ties them to the list of runs and to the range of steps.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const views = new Map(); // the element of a chart -> its Vega view
  const range = { axis: "step", low: null, high: null };

  const series = () =>
    [...document.querySelectorAll("#legend input")].filter((box) => box.checked).map((box) => Number(box.dataset.series));

  // Minutes of training at a step, between those that the page knows.
  function minutesAt(run, step) {
    const { steps, minutes } = data.minutes[run];
    const next = steps.findIndex((each) => each >= step);
    if (next < 0) return null;
    if (next === 0 || steps[next] === step) return minutes[next];
    const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
    return minutes[next - 1] + share * (minutes[next] - minutes[next - 1]);
  }

  function rowsOf(chart) {
    if (chart.kind === "rows") return chart.rows;
    return chart.curves.flatMap((curve, line) => {
      const run = data.runs[curve.run];
      const name = curve.rank === null ? run.name : `${run.name}, rank ${curve.rank}`;
      return curve.steps.map((step, place) => ({
        run: name, series: run.series, line, step, value: curve.values[place],
        x: range.axis === "step" ? step : minutesAt(curve.run, step),
      })).filter((row) => row.x !== null);
    });
  }

  function specOf(chart) {
    const spec = structuredClone(chart.spec);
    if (chart.kind === "curves") {
      const title = range.axis === "step" ? "optimizer step" : "training time (minutes)";
      spec.encoding.x = { ...spec.encoding.x, title };
    }
    return spec;
  }

  async function draw(chart) {
    const place = byId(chart.id);
    if (place.clientWidth === 0) return; // folded: drawn once it is opened
    views.get(place)?.finalize();
    const spec = { ...specOf(chart), datasets: { rows: rowsOf(chart) } };
    const options = {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, config: data.config,
      tooltip: { disableDefaultStyle: true },
    };
    try {
      const { view } = await vegaEmbed(place, spec, options);
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
    view.addSignalListener("brush", (_, value) => { if (value.x) selected = value.x; });
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
    await view.runAsync();
  }

  const updateAll = () => Promise.all([...views.values()].map(update));

  function zoom(low, high) {
    const digits = range.axis === "step" ? 0 : 2;
    const rounded = (value, round) => (value === null ? null : round(value * 10 ** digits) / 10 ** digits);
    range.low = rounded(low, Math.floor);
    range.high = rounded(high, Math.ceil);
    byId("low").value = range.low ?? "";
    byId("high").value = range.high ?? "";
    updateAll();
  }

  async function drawAll() {
    for (const chart of data.charts) await draw(chart);
    document.documentElement.dataset.drawn = views.size;
  }

  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  const tick = (checked) => {
    for (const box of document.querySelectorAll("#legend input")) box.checked = checked;
    updateAll();
  };
  byId("legend").addEventListener("change", updateAll);
  byId("all").addEventListener("click", () => tick(true));
  byId("none").addEventListener("click", () => tick(false));
  if (byId("axis")) {
    byId("axis").addEventListener("change", async () => {
      range.axis = byId("axis").value;
      zoom(null, null);
      await drawAll();
    });
    for (const id of ["low", "high"]) {
      byId(id).addEventListener("change", () => {
        [range.low, range.high] = [number("low"), number("high")];
        updateAll();
      });
    }
    byId("whole").addEventListener("click", () => zoom(null, null));
  }
  for (const fold of document.querySelectorAll("details.fold")) {
    fold.addEventListener("toggle", () => {
      const undrawn = data.charts.filter((chart) => fold.contains(byId(chart.id)) && !views.has(byId(chart.id)));
      undrawn.reduce((before, chart) => before.then(() => draw(chart)), Promise.resolve());
    });
  }
  drawAll();
})();
