"use strict";
// Draws the charts of the page, and ties them to the list of runs and to the range of steps.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const views = new Map(); // the element of a chart -> its Vega view
  const drawn = new Map(); // a chart -> the form in which it is drawn
  const range = { axis: "step", low: null, high: null };
  const SMOOTHED = 30; // points of a curve from which on it is smoothed: fewer are evaluations

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

  const share = () => Number(byId("smooth")?.value ?? 0);
  // What a chart was drawn for: if it changes, the chart is drawn again.
  const form = (chart) => (chart.kind === "curves" ? `${range.axis} ${share()}` : "");

  function rowsOf(chart) {
    if (chart.kind === "rows") return chart.rows;
    return chart.curves.flatMap((curve, line) => {
      const run = data.runs[curve.run];
      const points = share() && curve.means ? curve.means : curve.steps.map((step, place) => [step, curve.values[place]]);
      return points.map(([step, value]) => ({
        run: run.name, series: run.series, line, step, value,
        x: range.axis === "step" ? step : minutesAt(curve.run, step),
      })).filter((row) => row.x !== null);
    });
  }

  function specOf(chart) {
    const spec = structuredClone(chart.spec);
    if (chart.kind !== "curves") return spec;
    spec.encoding.x.title = range.axis === "step" ? "optimizer step" : "training time (minutes)";
    if (range.axis !== "step") delete spec.encoding.x.axis.tickMinStep;
    const longest = Math.max(...chart.curves.map((curve) => curve.steps.length));
    if (share() && longest > SMOOTHED) {
      const means = Math.max(...chart.curves.map((curve) => curve.means?.length ?? curve.steps.length));
      const each = Math.max(1, Math.round((means * share()) / 2));
      const mean = { op: "mean", field: "value", as: "value" };
      spec.encoding.y.title += ", smoothed";
      spec.layer[1].encoding.tooltip.at(-1).title += ", smoothed";
      spec.transform.unshift({ window: [mean], frame: [-each, each], groupby: ["line"], sort: [{ field: "step" }] });
    }
    return spec;
  }

  async function draw(chart) {
    const place = byId(chart.id);
    if (place.clientWidth === 0 || drawn.get(chart) === form(chart)) return; // folded, or as it should be
    drawn.set(chart, form(chart));
    views.get(place)?.finalize();
    const spec = { ...specOf(chart), datasets: { rows: rowsOf(chart) } };
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
    await view.resize().runAsync(); // the labels may be wider now
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

  // Charts are drawn one after the other once they come near the screen, and all of them for paper.
  let queue = Promise.resolve();
  const enqueue = (chart) => { queue = queue.then(() => draw(chart)); return queue; };
  const chartOf = new Map(data.charts.map((chart) => [byId(chart.id), chart]));
  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) enqueue(chartOf.get(entry.target));
  }, { rootMargin: "800px" });
  const near = () => { for (const place of chartOf.keys()) { nearby.unobserve(place); nearby.observe(place); } };
  const drawAll = () => Promise.all(data.charts.map(enqueue));

  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  const tick = (checked) => {
    for (const box of document.querySelectorAll("#legend input")) box.checked = checked;
    updateAll();
  };
  byId("legend").addEventListener("change", updateAll);
  byId("all").addEventListener("click", () => tick(true));
  byId("none").addEventListener("click", () => tick(false));
  if (byId("axis")) {
    byId("axis").addEventListener("change", () => {
      range.axis = byId("axis").value;
      zoom(null, null);
      near();
    });
    byId("smooth").addEventListener("change", near);
    for (const id of ["low", "high"]) {
      byId(id).addEventListener("change", () => {
        [range.low, range.high] = [number("low"), number("high")];
        updateAll();
      });
    }
    byId("whole").addEventListener("click", () => zoom(null, null));
  }
  window.addEventListener("beforeprint", drawAll);
  near();
  // Off the screen too, when there is nothing better to do.
  setTimeout(() => drawAll().then(() => { document.documentElement.dataset.drawn = views.size; }), 500);
})();
