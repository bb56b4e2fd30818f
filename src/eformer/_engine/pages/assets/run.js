// The page of a run: its steps on a time line, sizes, metrics, change and retention.
//
// A source of a run answers `run()` -> {title, path, steps: [{number, name, saved_at, nbytes, why, metrics: {name: number},
// problem, is_removed, kept_by: [text], change: {norm, relative, from_zero?, became, special}}], past: [{number, metrics}] of removed steps,
// metrics: [name], rules: [text], own: null or {every: [text], keeps_all} of the run itself, nbytes, has_values, notes, made_by, made_at}. If pages of steps
// can be opened, `stepLink(step)` is an address. A source of a run that trains has `follow(draw)`, `badge`, an element that says so, and `say(text)`.
"use strict";
(() => {
  const { h, s, bytes, count, many, number, percent } = eformer;

  eformer.drawRun = async (source) => {
    let last = await source.run();
    drawSteps(source, last);
    document.documentElement.dataset.ready = "true";
    setInterval(() => document.querySelectorAll("time[data-ago]").forEach((one) => { one.textContent = eformer.ago(one.dateTime); }), 1000);
    source.follow?.((run) => {
      keepingPlace(() => drawSteps(source, run));
      if (last.is_complete && run.is_complete) source.say(newsOf(last.steps, run.steps));
      last = run;
    });
  };
  // Text on steps that appeared, or were damaged, for screen readers.
  const newsOf = (before, after) => {
    const known = new Map(before.map((step) => [step.name, step]));
    return after.filter((step) => !known.has(step.name) || (step.problem && !known.get(step.name).problem)).slice(-3)
      .map((step) => `${step.name} ${step.problem ? "is damaged" : "was saved"}`).join(", ");
  };
  const MOST_ROWS = 300;
  let isWhole = false, smoothing = 0;
  // Keep the choice, the scroll positions and the focus while everything is drawn again.
  let lastChosen = null;
  const keepingPlace = (draw) => {
    const table = document.querySelector("div.table"), id = document.activeElement?.id, link = document.activeElement?.getAttribute("href");
    const focused = id ? `#${CSS.escape(id)}` : link ? `a[href="${CSS.escape(link)}"]` : null;
    const [x, y, top, left] = [scrollX, scrollY, table?.scrollTop ?? 0, table?.scrollLeft ?? 0];
    draw();
    document.querySelector("div.table")?.scrollTo({ top, left });
    scrollTo(x, y);
    if (focused) document.querySelector(focused)?.focus({ preventScroll: true });
  };

  const drawSteps = (source, run) => {
    const app = document.getElementById("app");
    const steps = run.steps;
    const chosen = { step: null, listeners: [] };
    const choose = (step, { scroll = false } = {}) => { chosen.step = step; lastChosen = step.number; chosen.listeners.forEach((told) => told(step, scroll)); };
    const past = run.past.map((step) => ({ ...step, isPast: true }));
    const all = [...past, ...steps].sort((a, b) => a.number - b.number);
    const axis = axisOf(all);
    document.title = `${eformer.visible(run.title)} · ${steps.length ? `step ${steps.at(-1).number}` : "no steps yet"}`;
    app.replaceChildren(
      eformer.header({ kind: "run", badge: source.badge }),
      h("div.page",
        h("div.title", h("div", h("h1", eformer.name(run.title)), h("p.muted.facts", h("bdi.mono", eformer.visible(run.path)), span(steps))), state(run, Boolean(source.follow))),
        tiles(run),
        run.notes.length ? h(steps.some((step) => step.change?.became) ? "ul.notes.bad" : "ul.notes", { "aria-label": "Notes" }, run.notes.map((note) => h("li", eformer.visible(note)))) : null,
        steps.length ? timeline(run, axis, all, choose, chosen) : null,
        all.length ? charts(run, axis, all, choose, chosen) : h("p.muted.empty", "No steps yet. ", source.follow ? "A step appears here as soon as it is saved." : null),
        steps.length ? table(run, source, choose, chosen) : null,
        h("footer.muted.small", `Made by ${run.made_by}, ${eformer.time(run.made_at)}.`)));
    app.removeAttribute("aria-busy");
    const before = steps.find((step) => step.number === lastChosen);
    if (before) choose(before);
  };

  const span = (steps) => {
    const times = steps.map((step) => step.saved_at).filter(Boolean);
    if (!times.length) return null;
    const dot = () => h("span.dot", { "aria-hidden": "true" }, "·");
    return [dot(), `${eformer.time(times[0])} to ${eformer.time(times.at(-1))}`, dot(), eformer.duration((new Date(times.at(-1)) - new Date(times[0])) / 1000)];
  };
  const age = (text) => h("time.muted", { datetime: text, "data-ago": true }, eformer.ago(text));
  const state = ({ steps, is_complete }, isLive) => {
    if (!is_complete) return eformer.state("neutral", "○", "reading the steps", "The newest are read first.");
    const damaged = steps.filter((step) => step.problem).length, whole = "File sizes match. eformer verify checks every byte.";
    if (!steps.length) return eformer.state("neutral", "○", isLive ? "waiting for the first step" : "no steps yet", isLive ? "This page follows the run." : "");
    return damaged ? eformer.state("bad", "✗", many(damaged, "damaged step"), "eformer verify checks every byte of the others.") : eformer.state("good", "✓", "every step is whole", whole);
  };
  const retention = ({ steps, rules, own, is_complete }) => {
    if (!is_complete) return [h("span.big", "…")];
    const removed = steps.filter((step) => step.is_removed), saves = own?.every.length ? `saves ${own.every.join("; ")}` : null;
    const keeps = rules.length ? `keeps ${rules.join("; ")}` : own?.keeps_all ? "removes nothing" : "no rule is recorded or given, such as --keep 3";
    const frees = removed.length ? `${bytes(removed.reduce((sum, step) => sum + step.nbytes, 0))} would be freed` : rules.length && steps.length ? "nothing would be removed" : null;
    return [h("span.big", !steps.length ? "–" : rules.length ? `${count(steps.length - removed.length)} stay` : "all stay"), h("span.small.muted", [saves, keeps, frees].filter(Boolean).map(eformer.visible).join(" · "))];
  };
  const tiles = (run) => {
    const { steps } = run;
    const tile = eformer.stat;
    const last = steps.at(-1);
    return h("dl.tiles",
      tile("Steps", count(steps.length), [steps.length ? `${count(steps[0].number)} to ${count(last.number)}` : "", run.past.length ? `, ${count(run.past.length)} removed` : ""]),
      tile("On disk", bytes(run.nbytes), "shared bytes once"),
      tile("Last step", last ? count(last.number) : "–", last?.saved_at ? age(last.saved_at) : ""),
      h("div.stat.wide", h("dt", "Rules"), h("dd", retention(run))));
  };

  // Steps are placed by their numbers, with a margin so that the first and the last are drawn whole.
  const axisOf = (steps) => {
    const low = steps[0]?.number ?? 0, high = steps.at(-1)?.number ?? 1;
    const at = (n) => high === low ? 0.5 : 0.012 + 0.976 * (n - low) / (high - low);
    const nearest = (some, part) => some.reduce((best, step) => Math.abs(at(step.number) - part) < Math.abs(at(best.number) - part) ? step : best, some[0]);
    const goal = Math.max(1, (high - low) / 8), base = 10 ** Math.floor(Math.log10(goal));
    const gap = [1, 2, 5, 10].map((n) => n * base).find((n) => n >= goal);
    const first = Math.ceil(low / gap) * gap, ticks = new Set();  // beyond 2**53, adding may give the same number
    for (let n = 0; first + n * gap <= high && n <= 10; n++) ticks.add(first + n * gap);
    return { at, nearest, ticks: ticks.size ? [...ticks] : [low] };
  };
  const words = (step) => step.isPast ? [`step ${count(step.number)}, removed`, metricWords(step)] : [`step ${count(step.number)}`, [bytes(step.nbytes), step.saved_at && eformer.time(step.saved_at), step.why && `saved: ${step.why}`].filter(Boolean).join(" · "),
    step.problem ? `damaged: ${step.problem}` : null,
    alarm(step.change), typeof step.change?.relative === "number" ? `change since the step before: ${percent(step.change.relative)}` : null,
    step.is_removed ? "would be removed" : step.kept_by.length ? `stays: ${step.kept_by.join("; ")}` : null,
    metricWords(step)];
  const metricWords = (step) => Object.entries(step.metrics).slice(0, 6).map(([name, value]) => `${eformer.visible(name)} ${value === null ? "not finite" : number(value, 4)}`).join(" · ");
  // Text on leaves that became NaN or infinite in this step, or already were.
  const alarm = (change) => change?.became ? `${many(change.became, "leaf", "leaves")} became NaN or Inf`
    : change?.special ? `NaN or Inf in ${many(change.special, "leaf", "leaves")}` : null;
  const changeWords = (change) => change.problem ?? (change.from_zero ? "from zero" : (change.relative ?? null) === null ? "–" : percent(change.relative));
  const kind = (step) => step.isPast ? "past" : step.problem ? "bad" : step.is_removed ? "gone" : "kept";

  // A chart over steps. It describes the step of `points` that is next to the pointer, and a click chooses it. `place` returns its height, if it has a dot.
  const plot = (axis, choose, chosen, { label, height, draw, points, place, about = words }) => {
    const width = 1000;
    const cursor = s("line.cursor", { y1: 0, y2: height, visibility: "hidden" }), dot = s("line.dot", { visibility: "hidden" });
    const picture = s("svg.plot", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label, style: { height: `${height}px` } },
      axis.ticks.map((n) => s("line.tick", { x1: axis.at(n) * width, x2: axis.at(n) * width, y1: 0, y2: height })), draw(width, height), cursor, dot);
    const hit = h("div.hit", { "data-tip": "" });
    let under = null;
    const find = (event) => { const at = hit.getBoundingClientRect(); under = axis.nearest(points, (event.clientX - at.left) / at.width); };
    const mark = (step) => {
      const y = step && place ? place(step, height) : null;
      const set = (line, isShown, more) => { for (const [name, value] of Object.entries({ visibility: isShown ? "visible" : "hidden", ...more })) line.setAttribute(name, value); };
      const x = step ? axis.at(step.number) * width : 0;
      set(cursor, step, { x1: x, x2: x });
      set(dot, y !== null, { x1: x, x2: x + 0.01, y1: y ?? 0, y2: y ?? 0 });
    };
    hit.addEventListener("pointermove", (event) => { find(event); mark(under); }, true);
    hit.addEventListener("pointerleave", () => mark(chosen.step));
    hit.addEventListener("click", (event) => { find(event); if (!under.isPast) choose(under, { scroll: true }); });
    eformer.tips(hit, () => under && about(under));
    chosen.listeners.push(mark);
    return h("div.plot-box", picture, hit);
  };
  // In short, such as 10k, unless two of them would read alike.
  const tickLabels = ({ ticks, at }) => {
    const short = ticks.map((n) => eformer.amount(n).replace(" ", "")), texts = new Set(short).size < ticks.length ? ticks.map(count) : short;
    return h("div.axis-labels", { "aria-hidden": "true" }, ticks.map((n, which) => h("span", { style: { left: `${at(n) * 100}%` } }, texts[which])));
  };

  const timeline = (run, axis, all, choose, chosen) => {
    const most = Math.max(1, ...run.steps.map((step) => step.nbytes));
    const wide = Math.max(1.5, Math.min(10, 700 / all.length));
    const draw = (width, height) => all.map((step) => {
      const tall = step.isPast ? 3 : Math.max(2, (step.nbytes / most) * (height - 6));
      return s(`rect.step.${kind(step)}`, { x: axis.at(step.number) * width - wide / 2, width: wide, y: height - (step.problem ? height : tall), height: step.problem ? height : tall, rx: 1 });
    });
    return h("section", { "aria-labelledby": "steps-title" },
      h("div.bar", h("h2", { id: "steps-title" }, "Steps"), h("span.small.muted", `bytes that each adds, up to ${bytes(most)}`),
        h("div.legend.choice", h("i.kept"), h("span", run.rules.length ? "stays" : "step"), run.steps.some((step) => step.is_removed) ? [h("i.gone"), h("span", "would be removed")] : null, run.past.length ? [h("i.past"), h("span", "removed")] : null, h("i.bad"), h("span", "damaged"))),
      plot(axis, choose, chosen, { label: `Sizes of ${many(run.steps.length, "step")}; the table below has them`, height: 74, draw, points: all }), tickLabels(axis));
  };

  // An exponential mean, as if the curve had been at its first values before.
  const smoothed = (points) => {
    let mean = 0, weight = 0;
    return points.map(([step, value]) => { mean = smoothing * mean + (1 - smoothing) * value; weight = smoothing * weight + 1 - smoothing; return [step, mean / weight]; });
  };

  const charts = (run, axis, all, choose, chosen) => {
    // Steps that have no point because their value is not finite are marked: `odd`.
    const series = run.metrics.map((name) => ({ name, points: all.filter((step) => typeof step.metrics[name] === "number").map((step) => [step, step.metrics[name]]),
      odd: all.filter((step) => Object.hasOwn(step.metrics, name) && step.metrics[name] === null) }));
    const change = run.steps.filter((step) => typeof step.change?.relative === "number").map((step) => [step, step.change.relative]);
    series.push({ name: "‖change‖ / ‖step before‖", points: change, isChange: true, odd: run.steps.filter((step) => alarm(step.change)) });
    const shown = series.filter((one) => one.points.length || one.odd.length);
    if (!shown.length) return null;
    const smoothers = [];
    const slider = h("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: smoothing, oninput: () => { smoothing = Number(slider.value); smoothers.forEach((smooth) => smooth()); } });
    return h("section", { "aria-labelledby": "metrics-title" }, h("div.bar", h("h2", { id: "metrics-title" }, shown.some((one) => one.isChange) ? "Metrics and change" : "Metrics"), h("label.choice", "smooth ", slider)),
      h("div.charts", shown.slice(0, 24).map((one) => chart(one, axis, choose, chosen, smoothers))));
  };

  const chart = (one, axis, choose, chosen, smoothers) => {
    const values = one.points.map(([, value]) => value), valueOf = new Map(one.points);
    const low = values.length ? Math.min(...values) : 0, high = values.length ? Math.max(...values) : 0;
    const last = one.odd.length && one.odd.at(-1).number >= (one.points.at(-1)?.[0].number ?? -Infinity) ? one.isChange ? alarm(one.odd.at(-1).change) : "not finite" : null;
    const marked = one.odd.length ? `; ${one.isChange ? "NaN or Inf" : "not finite"} at ${one.odd.length > 6 ? many(one.odd.length, "step") : `step ${one.odd.map((step) => step.number).join(", ")}`}` : "";
    const short = one.isChange ? percent : (value) => number(value, 4), long = (value) => one.isChange ? `${Number((100 * value).toPrecision(6))} %` : number(value, 9);
    const format = high !== low && short(high) === short(low) ? long : short;  // two ends of an axis never read the same
    const at = (value, height) => high === low ? height / 2 : height - 8 - (height - 16) * (value - low) / (high - low);
    const draw = (width, height) => {
      const line = (points) => points.map(([step, value]) => `${(axis.at(step.number) * width).toFixed(1)},${at(value, height).toFixed(1)}`).join(" ");
      const dots = one.points.length <= 60 ? one.points.map(([step, value]) => s("line.dot", { x1: axis.at(step.number) * width, x2: axis.at(step.number) * width + 0.01, y1: at(value, height), y2: at(value, height) })) : null;
      const raw = s("g", s("polyline.curve", { points: line(one.points) }), dots), mean = s("polyline.curve");
      const smooth = () => { raw.classList.toggle("faint", smoothing > 0); mean.setAttribute("points", smoothing ? line(smoothed(one.points)) : ""); };
      smoothers.push(smooth);
      smooth();
      return [one.odd.map((step) => s("line.odd-step", { x1: axis.at(step.number) * width, x2: axis.at(step.number) * width, y1: 0, y2: height })), raw, mean];
    };
    const label = `${one.name}: ${one.points.length ? `${format(values[0])} at step ${one.points[0][0].number}, ${format(values.at(-1))} at step ${one.points.at(-1)[0].number}; from ${format(low)} to ${format(high)}` : "no finite value"}${marked}`;
    const points = [...valueOf.keys(), ...one.odd].sort((a, b) => a.number - b.number);
    const about = (step) => { const [first, ...more] = words(step); return [`${eformer.visible(one.name)} ${valueOf.has(step) ? format(valueOf.get(step)) : "not finite"} · ${first}`, ...more]; };
    return h("figure.chart", h("figcaption", h("bdi.mono", eformer.visible(one.name)), h("b", { class: last ? "bad" : "" }, last ?? format(values.at(-1)))),
      marked ? h("p.small.bad", marked.slice(2)) : null,
      h("div.with-range", h("div.range.small.muted", { "aria-hidden": "true" }, h("span", values.length ? format(high) : ""), high === low ? null : h("span", format(low))),
        plot(axis, choose, chosen, { label, height: 96, draw, points, about, place: (step, height) => valueOf.has(step) ? at(valueOf.get(step), height) : null }), tickLabels(axis)));
  };

  const table = (run, source, choose, chosen) => {
    const metrics = run.metrics.slice(0, 6);
    const hasRules = run.rules.length > 0, hasChange = run.steps.some((step) => step.change);
    const newest = [...run.steps].reverse(), rows = new Map(), body = h("tbody");
    const cell = (label, what, ...shown) => h(`td${what}`, { "data-label": eformer.visible(label) }, ...shown);
    const note = (step) => [alarm(step.change) ? h("span.flag.bad", alarm(step.change)) : null, step.problem ? [h("span.flag.bad", "damaged"), h("bdi.small", ` ${eformer.visible(step.problem)}`)]
      : step.is_removed ? h("span.flag", "would be removed") : h("span.small.muted", eformer.visible(step.kept_by.join("; ")))];
    const metric = (step, name) => !Object.hasOwn(step.metrics, name) ? "" : step.metrics[name] === null ? "not finite" : number(step.metrics[name], 4, { isColumn: true });
    const rowOf = (step) => {
      const link = source.stepLink?.(step);
      const label = h("bdi", eformer.visible(step.name));
      const row = h("tr", { class: kind(step), onclick: () => choose(step) }, h("th", { scope: "row" }, link ? h("a", { href: link }, label) : label),
        cell("Saved", "", step.saved_at ? [eformer.time(step.saved_at, { hasZone: false }), " ", age(step.saved_at)] : ""), cell("Why", "", eformer.visible(step.why)),
        cell("Size", ".num", bytes(step.nbytes)), metrics.map((name) => cell(name, ".num", metric(step, name))),
        hasChange ? cell("Change", ".num", step.change ? changeWords(step.change) : "") : null, cell("", ".note", note(step)));
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
      h("div.table", h("table.steps", h("thead", h("tr", ["Step", "Saved (UTC)", "Why"].map((text) => h("th", { scope: "col" }, text)), h("th.num", { scope: "col" }, "Size"),
        metrics.map((name) => h("th.num", { scope: "col" }, h("bdi", eformer.visible(name)))), hasChange ? h("th.num", { scope: "col" }, "Change") : null, h("th", { scope: "col" }, hasRules ? "Retention" : ""))), body)), more);
  };
})();
