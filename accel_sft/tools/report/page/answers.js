"use strict";
// The answers of two evaluations side by side. Everything from a run is set as text, never as markup.
(() => {
  const byId = (id) => document.getElementById(id);
  if (!byId("answers")) return;
  const { answers, runs } = JSON.parse(byId("data").textContent);
  const PAGE = 25;
  const SAME = "same text as expected";
  const CONTROL = /[\u0000-\u0008\u000b-\u001f]/g;
  const text = (content) => content.replace(CONTROL, (mark) => String.fromCharCode(0x2400 + mark.charCodeAt(0)));
  let shown = PAGE;

  const rowsOf = (number) =>
    new Map(number === "" ? [] : answers.evaluations[number].rows.map((row) => [row[0], row]));
  const title = (number) =>
    number === "" ? "nothing" : `${runs[answers.evaluations[number].run].name}: ${answers.evaluations[number].label}`;

  function option(select, value, label) {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = label;
    select.append(made);
  }

  // A score of 0 or 1 means wrong or right; any other score is a number that may rise or fall.
  function value(row, score) {
    if (row === undefined) return null;
    if (score === SAME) return Number(row[1] === answers.examples[row[0]][1]);
    return row[2][score] ?? null;
  }

  function fill() {
    option(byId("left"), "", "nothing");
    answers.evaluations.forEach((_, number) => {
      option(byId("left"), number, title(number));
      option(byId("right"), number, title(number));
    });
    for (const score of [...answers.scores, SAME]) option(byId("score"), score, score);
    // At first, show the first run: its evaluation before training on the left, its newest one on the right.
    const mine = answers.evaluations.map((each, number) => ({ ...each, number })).filter((each) => each.run === answers.evaluations[0].run);
    byId("right").value = mine.at(-1).number;
    byId("left").value = mine.length > 1 ? mine[0].number : "";
    const main = runs[mine[0].run].main;
    byId("score").value = answers.scores.includes(main) ? main : SAME;
  }

  function mark(cell, score) {
    if (score === null) return;
    const made = document.createElement("span");
    const known = score === 1 ? ["right", "✓ right"] : score === 0 ? ["wrong", "✗ wrong"] : ["", String(Number(score.toPrecision(4)))];
    made.className = `mark ${known[0]}`;
    made.textContent = known[1];
    cell.append(made);
  }

  function cell(row, label, content, score) {
    const made = document.createElement("td");
    made.dataset.label = label;
    if (content !== null) {
      const inner = document.createElement("div");
      inner.className = "text";
      inner.dir = "auto";
      inner.textContent = content;
      made.append(inner);
    }
    if (score !== undefined) mark(made, score);
    row.append(made);
    return made;
  }

  const CHANGES = { better: "became right", worse: "became wrong", other: "other text", same: "same text", none: "" };
  const rose = (pair) => (pair.now === 1 ? CHANGES.better : "scored higher");
  const fell = (pair) => (pair.now === 0 ? CHANGES.worse : "scored lower");

  function pairs() {
    const [left, right] = [rowsOf(byId("left").value), rowsOf(byId("right").value)];
    const score = byId("score").value;
    const examples = byId("left").value === "" ? [...right.keys()] : [...right.keys()].filter((each) => left.has(each));
    return examples.map((example) => {
      const [before, after] = [left.get(example), right.get(example)];
      const pair = { example, before, after, was: value(before, score), now: value(after, score) };
      const scored = before && pair.was !== null && pair.now !== null;
      pair.changed = Boolean(before) && before[1] !== after[1];
      pair.kind = !before ? "none" : scored && pair.now > pair.was ? "better" : scored && pair.now < pair.was ? "worse" : pair.changed ? "other" : "same";
      return pair;
    });
  }

  const KEEP = {
    all: () => true,
    changed: (pair) => pair.changed,
    better: (pair) => pair.kind === "better",
    worse: (pair) => pair.kind === "worse",
    right: (pair) => pair.now === 1,
    wrong: (pair) => pair.now !== null && pair.now < 1,
  };

  function contains(pair, wanted) {
    const texts = [...answers.examples[pair.example], pair.after[1], ...(pair.before ? [pair.before[1]] : [])];
    return texts.some((content) => content.toLowerCase().includes(wanted));
  }

  function draw() {
    const every = pairs();
    const wanted = byId("search").value.toLowerCase();
    const kept = every.filter((pair) => KEEP[byId("which").value](pair) && (!wanted || contains(pair, wanted)));
    const [leftTitle, rightTitle] = [title(byId("left").value), title(byId("right").value)];
    byId("left-head").textContent = leftTitle;
    byId("right-head").textContent = rightTitle;
    byId("answer-table").tBodies[0].replaceChildren(...kept.slice(0, shown).map((pair) => {
      const row = document.createElement("tr");
      row.tabIndex = 0;
      const [prompt, expected] = answers.examples[pair.example];
      cell(row, "prompt", text(prompt));
      cell(row, "expected", text(expected));
      cell(row, leftTitle, pair.before ? text(pair.before[1]) : null, pair.was);
      cell(row, rightTitle, text(pair.after[1]), pair.now);
      const change = cell(row, "change", null);
      change.className = `change ${pair.kind}`;
      change.textContent = pair.kind === "better" ? `▲ ${rose(pair)}` : pair.kind === "worse" ? `▼ ${fell(pair)}` : CHANGES[pair.kind];
      return row;
    }));
    const count = (kind) => every.filter((pair) => pair.kind === kind).length;
    const compared = byId("left").value !== "";
    const whole = every.every((pair) => [null, 0, 1].includes(pair.was) && [null, 0, 1].includes(pair.now));
    const [up, down] = whole ? [CHANGES.better, CHANGES.worse] : ["scored higher", "scored lower"];
    const sum = compared ? ` ${count("better")} ${up}, ${count("worse")} ${down}.` : "";
    const alone = compared && every.length === 0 ? " The two have no example in common." : "";
    byId("count").textContent =
      `${kept.length.toLocaleString("en")} of ${every.length.toLocaleString("en")} examples${kept.length > shown ? `, the first ${shown} shown` : ""}.${sum}${alone}`;
    byId("more-answers").hidden = kept.length <= shown;
  }

  const again = () => { shown = PAGE; draw(); };
  fill();
  for (const id of ["left", "right", "score", "which"]) byId(id).addEventListener("change", again);
  byId("search").addEventListener("input", again);
  byId("more-answers").addEventListener("click", () => { shown += PAGE; draw(); });
  byId("answer-table").addEventListener("keydown", (event) => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (next && event.target.matches("tr")) {
      event.target[next]?.focus();
      event.preventDefault();
    }
  });
  draw();
})();
