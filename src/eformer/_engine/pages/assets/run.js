// The page of a run: its steps on a time line, sizes, metrics, change and retention.
//
// A source of a run answers `run()` -> {title, path, steps: [{number, name, saved_at, nbytes, why, metrics: {name: number},
// problem, is_removed, kept_by: [text], change: {norm, relative, from_zero?, became, special}}], metrics: [name], rules: [text], nbytes, has_values,
// notes, made_by, made_at}, and `stepLink(step)`, if pages of steps can be opened: an address, or null.
"use strict";
(() => {
  const { h, s, bytes, count, many, number, percent } = eformer;

  // A source that follows a run, `follow(draw)`, calls `draw(run)` whenever the run has changed.
  eformer.drawRun = async (source) => {
    drawSteps(source, await source.run());
    document.documentElement.dataset.ready = "true";
    source.follow?.((run) => keepingPlace(() => drawSteps(source, run)));
  };
  const MOST_ROWS = 300;
  let isWhole = false;
  // Keep the choice, the scroll positions and the focus while everything is drawn again.
  let lastChosen = null;
  const keepingPlace = (draw) => {
    const table = document.querySelector("div.table"), focused = document.activeElement?.getAttribute("href");
    const [x, y, top, left] = [scrollX, scrollY, table?.scrollTop ?? 0, table?.scrollLeft ?? 0];
    draw();
    document.querySelector("div.table")?.scrollTo({ top, left });
    scrollTo(x, y);
    if (focused) document.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  };

  const drawSteps = (source, run) => {
    const app = document.getElementById("app");
    const steps = run.steps;
    const chosen = { step: null, listeners: [] };
    const choose = (step, { scroll = false } = {}) => { chosen.step = step; lastChosen = step.number; chosen.listeners.forEach((told) => told(step, scroll)); };
    const axis = axisOf(steps);
    app.replaceChildren(
      eformer.header({}),
      h("div.page",
        h("div.title", h("div", h("h1", eformer.name(run.title)), h("p.muted.facts", h("bdi.mono", eformer.visible(run.path)), span(steps))), state(steps, run.is_complete)),
        tiles(run),
        run.notes.length ? h("ul.notes", { "aria-label": "Notes" }, run.notes.map((note) => h("li", eformer.visible(note)))) : null,
        steps.length ? [timeline(run, axis, choose, chosen), charts(run, axis, choose, chosen), table(run, source, choose, chosen)]
          : h("p.muted.empty", "No steps yet."),
        h("footer.muted.small", `Made by ${run.made_by}, ${eformer.time(run.made_at)}.`)));
    app.removeAttribute("aria-busy");
    const before = steps.find((step) => step.number === lastChosen);
    if (before) choose(before);
  };

  const span = (steps) => {
    const times = steps.map((step) => step.saved_at).filter(Boolean);
    if (!times.length) return null;
    const hours = (new Date(times.at(-1)) - new Date(times[0])) / 3.6e6;
    const long = hours >= 48 ? `${(hours / 24).toFixed(1)} days` : hours >= 1 ? `${hours.toFixed(1)} hours` : `${Math.max(0, Math.round(hours * 60))} minutes`;
    return [h("span.dot", { "aria-hidden": "true" }, "·"), `${eformer.time(times[0])} to ${eformer.time(times.at(-1))}`, h("span.dot", { "aria-hidden": "true" }, "·"), long];
  };
  const state = (steps, isComplete = true) => {
    if (!isComplete) return eformer.state("neutral", "○", "reading the steps", "The newest are read first.");
    const damaged = steps.filter((step) => step.problem).length, text = "Lengths were compared; digests are compared by eformer verify.";
    return damaged ? eformer.state("bad", "✗", many(damaged, "damaged step"), text)
      : eformer.state("good", "✓", steps.length ? "every step is whole" : "no steps", text);
  };
  const tiles = (run) => {
    const { steps } = run;
    const tile = eformer.stat;
    const removed = steps.filter((step) => step.is_removed);
    const last = steps.at(-1);
    return h("dl.tiles",
      tile("Steps", count(steps.length), steps.length ? `${count(steps[0].number)} to ${count(last.number)}` : ""),
      tile("On disk", bytes(run.nbytes), "shared bytes once"),
      tile("Last step", last ? count(last.number) : "–", last?.saved_at ? eformer.time(last.saved_at) : ""),
      h("div.stat.wide", h("dt", "Retention"), h("dd", run.is_complete === false ? h("span.big", "…") : run.rules.length
        ? [h("span.big", `${count(steps.length - removed.length)} stay`), h("span.small.muted", `${run.rules.join("; ")}; ${removed.length ? `${bytes(removed.reduce((sum, step) => sum + step.nbytes, 0))} would be freed` : "nothing would be removed"}`)]
        : [h("span.big", "all stay"), h("span.small.muted", "no rule was given, such as --keep 3")])));
  };

  // Steps are placed by their numbers, with a margin so that the first and the last are drawn whole.
  const axisOf = (steps) => {
    const low = steps[0]?.number ?? 0, high = steps.at(-1)?.number ?? 1;
    const at = (n) => high === low ? 0.5 : 0.012 + 0.976 * (n - low) / (high - low);
    const nearest = (part) => steps.reduce((best, step) => Math.abs(at(step.number) - part) < Math.abs(at(best.number) - part) ? step : best, steps[0]);
    const goal = (high - low) / 8 || 1, base = 10 ** Math.floor(Math.log10(goal));
    const gap = [1, 2, 5, 10].map((n) => n * base).find((n) => n >= goal);
    const ticks = [];
    for (let n = Math.ceil(low / gap) * gap; n <= high; n += gap) ticks.push(n);
    return { at, nearest, ticks: ticks.length ? ticks : [low] };
  };
  const words = (step) => [`step ${count(step.number)}`, [bytes(step.nbytes), step.saved_at && eformer.time(step.saved_at), step.why && `saved: ${step.why}`].filter(Boolean).join(" · "),
    step.problem ? `damaged: ${step.problem}` : null,
    alarm(step.change), typeof step.change?.relative === "number" ? `change since the step before: ${percent(step.change.relative)}` : null,
    step.is_removed ? "would be removed" : step.kept_by.length ? `stays: ${step.kept_by.join("; ")}` : null,
    Object.entries(step.metrics).slice(0, 6).map(([name, value]) => `${eformer.visible(name)} ${number(value, 4)}`).join(" · ")];
  // Text on leaves that became NaN or infinite in this step, or already were.
  const alarm = (change) => change?.became ? `${many(change.became, "leaf", "leaves")} became NaN or Inf`
    : change?.special ? `NaN or Inf in ${many(change.special, "leaf", "leaves")}` : null;
  const changeWords = (change) => change.problem ?? (change.from_zero ? "from zero" : (change.relative ?? null) === null ? "–" : percent(change.relative));
  const kind = (step) => step.problem ? "bad" : step.is_removed ? "gone" : "kept";

  // A chart over steps. It describes the step under the pointer, and a click chooses it.
  const plot = (run, axis, choose, chosen, { label, height, draw }) => {
    const width = 1000;
    const cursor = s("line.cursor", { y1: 0, y2: height, visibility: "hidden" });
    const picture = s("svg.plot", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label, style: { height: `${height}px` } },
      axis.ticks.map((n) => s("line.tick", { x1: axis.at(n) * width, x2: axis.at(n) * width, y1: 0, y2: height })), draw(width, height), cursor);
    const hit = h("div.hit", { "data-tip": "" });
    const box = h("div.plot-box", picture, hit);
    let under = null;
    const find = (event) => { const at = hit.getBoundingClientRect(); under = axis.nearest((event.clientX - at.left) / at.width); };
    const mark = (step) => {
      if (!step) return cursor.setAttribute("visibility", "hidden");
      cursor.setAttribute("x1", axis.at(step.number) * width); cursor.setAttribute("x2", axis.at(step.number) * width); cursor.setAttribute("visibility", "visible");
    };
    hit.addEventListener("pointermove", (event) => { find(event); mark(under); }, true);
    hit.addEventListener("pointerleave", () => mark(chosen.step));
    hit.addEventListener("click", (event) => { find(event); choose(under, { scroll: true }); });
    eformer.tips(hit, () => under && words(under));
    chosen.listeners.push(mark);
    return box;
  };
  const tickLabels = (axis) => h("div.axis-labels", { "aria-hidden": "true" }, axis.ticks.map((n) => h("span", { style: { left: `${axis.at(n) * 100}%` } }, eformer.amount(n).replace(" ", ""))));

  const timeline = (run, axis, choose, chosen) => {
    const most = Math.max(1, ...run.steps.map((step) => step.nbytes));
    const wide = Math.max(1.5, Math.min(10, 700 / run.steps.length));
    const draw = (width, height) => run.steps.map((step) => {
      const tall = Math.max(2, (step.nbytes / most) * (height - 6));
      return s(`rect.step.${kind(step)}`, { x: axis.at(step.number) * width - wide / 2, width: wide, y: height - (step.problem ? height : tall), height: step.problem ? height : tall, rx: 1 });
    });
    return h("section", { "aria-labelledby": "steps-title" },
      h("div.bar", h("h2", { id: "steps-title" }, "Steps"), h("span.small.muted", `bytes that each adds, up to ${bytes(most)}`),
        h("div.legend.choice", h("i.kept"), h("span", run.rules.length ? "stays" : "step"), run.rules.length ? [h("i.gone"), h("span", "would be removed")] : null, h("i.bad"), h("span", "damaged"))),
      plot(run, axis, choose, chosen, { label: `Sizes of ${many(run.steps.length, "step")}; the table below has them`, height: 74, draw }), tickLabels(axis));
  };

  const charts = (run, axis, choose, chosen) => {
    // Steps that have no point because their value is not finite are marked: `odd`.
    const series = run.metrics.map((name) => ({ name, points: run.steps.filter((step) => typeof step.metrics[name] === "number").map((step) => [step, step.metrics[name]]),
      odd: run.steps.filter((step) => Object.hasOwn(step.metrics, name) && step.metrics[name] === null) }));
    const change = run.steps.filter((step) => typeof step.change?.relative === "number").map((step) => [step, step.change.relative]);
    series.push({ name: "‖change‖ / ‖step before‖", points: change, isChange: true, odd: run.steps.filter((step) => alarm(step.change)) });
    const shown = series.filter((one) => one.points.length || one.odd.length);
    if (!shown.length) return null;
    return h("section", { "aria-labelledby": "metrics-title" }, h("div.bar", h("h2", { id: "metrics-title" }, "Metrics and change")),
      h("div.charts", shown.slice(0, 24).map((one) => {
        const values = one.points.map(([, value]) => value);
        const low = values.length ? Math.min(...values) : 0, high = values.length ? Math.max(...values) : 0;
        const last = one.odd.length && one.odd.at(-1).number >= (one.points.at(-1)?.[0].number ?? -Infinity) ? one.isChange ? alarm(one.odd.at(-1).change) : "not finite" : null;
        const marked = one.odd.length ? `; ${one.isChange ? "NaN or Inf" : "not finite"} at ${one.odd.length > 6 ? many(one.odd.length, "step") : `step ${one.odd.map((step) => step.number).join(", ")}`}` : "";
        const format = one.isChange ? percent : (value) => number(value, 4);
        const at = (value, height) => high === low ? height / 2 : height - 8 - (height - 16) * (value - low) / (high - low);
        const draw = (width, height) => [
          one.odd.map((step) => s("line.odd-step", { x1: axis.at(step.number) * width, x2: axis.at(step.number) * width, y1: 0, y2: height })),
          s("polyline.curve", { points: one.points.map(([step, value]) => `${(axis.at(step.number) * width).toFixed(1)},${at(value, height).toFixed(1)}`).join(" ") }),
          one.points.length <= 60 ? one.points.map(([step, value]) => s("line.dot", { x1: axis.at(step.number) * width, x2: axis.at(step.number) * width + 0.01, y1: at(value, height), y2: at(value, height) })) : null];
        return h("figure.chart", h("figcaption", h("bdi.mono", eformer.visible(one.name)), h("b", { class: last ? "bad" : "" }, last ?? format(values.at(-1)))),
          marked ? h("p.small.bad", marked.slice(2)) : null,
          h("div.with-range", h("div.range.small.muted", { "aria-hidden": "true" }, h("span", values.length ? format(high) : ""), high === low ? null : h("span", format(low))),
            plot(run, axis, choose, chosen, { label: `${one.name}: ${one.points.length ? `${format(values[0])} at step ${one.points[0][0].number}, ${format(values.at(-1))} at step ${one.points.at(-1)[0].number}; from ${format(low)} to ${format(high)}` : "no finite value"}${marked}`, height: 96, draw })));
      })));
  };

  const table = (run, source, choose, chosen) => {
    const metrics = run.metrics.slice(0, 6);
    const hasRules = run.rules.length > 0, hasChange = run.steps.some((step) => step.change);
    const newest = [...run.steps].reverse(), rows = new Map(), body = h("tbody");
    const rowOf = (step) => {
      const link = source.stepLink?.(step);
      const label = h("bdi", eformer.visible(step.name));
      const row = h("tr", { class: kind(step), onclick: () => choose(step) },
        h("th", { scope: "row" }, link ? h("a", { href: link }, label) : label), h("td", step.saved_at ? eformer.time(step.saved_at) : ""), h("td", eformer.visible(step.why)),
        h("td.num", bytes(step.nbytes)), metrics.map((name) => h("td.num", Object.hasOwn(step.metrics, name) ? step.metrics[name] === null ? "not finite" : number(step.metrics[name], 4, { isColumn: true }) : "")),
        hasChange ? h("td.num", step.change ? changeWords(step.change) : "") : null,
        h("td.note", alarm(step.change) ? h("span.flag.bad", alarm(step.change)) : null, step.problem ? h("span.flag.bad", "damaged") : null, step.problem ? h("bdi.small", ` ${eformer.visible(step.problem)}`) : hasRules ? step.is_removed ? h("span.flag", "would be removed") : h("span.small.muted", eformer.visible(step.kept_by.join("; "))) : null));
      rows.set(step, row);
      return row;
    };
    // Draw the newest of thousands of steps first, and older ones on request.
    const more = h("button.link", { type: "button", id: "all-steps", onclick: () => { isWhole = true; fill(); } });
    const fill = () => {
      const shown = isWhole ? newest : newest.slice(0, MOST_ROWS);
      rows.clear();
      body.replaceChildren(...shown.map(rowOf));
      more.hidden = shown.length === newest.length;
      more.textContent = `Show ${many(newest.length - shown.length, "older step")}`;
    };
    fill();
    let selected = null;
    chosen.listeners.push((now, scroll) => {
      if (!rows.has(now)) { isWhole = true; fill(); }
      selected?.removeAttribute("aria-selected");
      selected = rows.get(now);
      selected.setAttribute("aria-selected", "true");
      if (scroll) selected.scrollIntoView({ block: "nearest" });
    });
    onbeforeprint = () => { if (!isWhole) { isWhole = true; fill(); } };
    return h("section", { "aria-labelledby": "table-title" }, h("div.bar", h("h2", { id: "table-title" }, "Every step")),
      h("div.table", h("table.steps", h("thead", h("tr", ["Step", "Saved", "Why"].map((text) => h("th", { scope: "col" }, text)), h("th.num", { scope: "col" }, "Size"),
        metrics.map((name) => h("th.num", { scope: "col" }, h("bdi", eformer.visible(name)))), hasChange ? h("th.num", { scope: "col" }, "Change") : null, h("th", { scope: "col" }, hasRules ? "Retention" : ""))), body)), more);
  };
})();
