// Helpers of all pages: numbers and names as text, elements, the theme.
//
// A page is drawn by `eformer.start(source)`; all data of a page come from its source. The source of a checkpoint has
// them in the page or asks a server (source.js, live.js):
//
//   summary    {kind: "checkpoint", title, path, format, writer, saved_at, leaves, values, params, nbytes, files,
//              dtypes: [{dtype, leaves, nbytes, params}], metadata: {name: text}, verification: {state, text},
//              origin: [[label, text]],
//              health: {nan, inf, zero}, has_values (or "on demand"), left_out, notes, signed_by, made_by, made_at,
//              against?: {title, path, saved_at, format}, run?: {title, href, steps: [number], against: number or null}}
//   changes    null, or {counts: {same, changed, added, removed, unknown, became}, became: [{path, ...change}],
//              added: [{path, what, nbytes}], removed, largest: [{path, ...change}], state: [the same, of optimizers],
//              heatmaps: [{stack, before, after, became, rows, more_rows, columns, cells: [[row, column, relative, why,
//              became]]}]}
//   root       the row of all leaves. A row is {path, name, kind: "group" | "leaf", parent, kids: [row], leaves, params,
//              nbytes, dtype, dtypes? (of a group), count? (of layers that are folded), special, damaged, shape?, value?,
//              problem?, change: null or {status, relative}}
//   children(row, {sort, descending}), search(query, {sort, descending}, filter)
//              -> [row]; sort is "" for the order of the tree, "name", "params", "nbytes", "dtype", "std" or "change".
//              A search finds leaves whose names contain the query, as text or as a glob. A filter is "became", "special"
//              (NaN or Inf), "zero", "changed" or "damaged"
//   counts()             -> the number of leaves that each filter shows
//   hint(query, filter)  -> another query that finds leaves, or undefined
//   compare()            -> a promise of the changes now, if leaves are read on demand; otherwise null
//   find(path, kind)     -> row
//   largest(row, most)   -> the largest rows below a group, and one row of the kind "rest" for the remaining rows
//   statistics(row)      -> null, or the statistics of a leaf that was read, as below
//   leaf(path) -> a promise of {path, dtype, shape, nbytes, params, value, boxes, sharding: {spec: [[axis]], mesh: [[axis,
//              size]]}, statistics: {size, min, max, mean, std, zeros, nan, posinf, neginf, magnitudes, histogram: {low,
//              high, scale, counts, below, above}}, problem, damaged, checked, change: {status, what, relative, largest,
//              share, unlike, from_zero, became_nan, became_inf}}
//
// Paths are written as by record/outline.py: escaped parts joined by dots; "" is the root.
"use strict";
const eformer = {};
(() => {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];

  eformer.bytes = (n) => {
    if (n === null) return "…";  // not known yet
    let unit = 0;
    while (n >= 999.5 && unit < units.length - 1) { n /= 1000; unit++; }
    return `${unit === 0 || n >= 99.95 ? n.toFixed(0) : trim(n.toPrecision(3))} ${units[unit]}`;
  };
  eformer.count = (n) => n.toLocaleString("en-US");
  eformer.many = (n, noun, plural) => `${eformer.count(n)} ${n === 1 ? noun : plural ?? noun + "s"}`;
  eformer.amount = (n) => {
    for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (n >= size * 0.9995) return `${trim((n / size).toPrecision(3))} ${unit}`;
    return String(n);
  };
  const trim = (text) => text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  // A number with so many digits; without trailing zeros, except in a column.
  eformer.number = (n, digits = 4, { isColumn = false } = {}) => {
    const trimmed = isColumn ? (text) => text : trim;
    if (n === null || n === undefined) return "–";
    if (typeof n === "string") return n;
    if (Number.isInteger(n) && Math.abs(n) < 1e7) return minus(eformer.count(n));
    const size = Math.abs(n);
    if (size >= 10 ** digits && size < 1e9) return minus(eformer.count(Math.round(n)));
    if (size >= 1e-3 && size < 1e9) return minus(trimmed(n.toPrecision(digits)));
    return minus(n.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e"));
  };
  const minus = (text) => text.replace("-", "−").replace("e-", "e−");
  eformer.percent = (part) => {
    if (part === 0) return "0 %";
    if (part === 1) return "100 %";
    if (part < 0.0001) return "< 0.01 %";
    if (part > 0.9999 && part < 1) return "> 99.99 %";
    if (part >= 9.995) return `${eformer.count(Number((100 * part).toPrecision(3)))} %`;
    return `${part < 0.001 ? trim((100 * part).toPrecision(2)) : (100 * part).toPrecision(3)} %`;
  };
  eformer.time = (text, { hasZone = true } = {}) => {
    const when = new Date(text);
    if (!text || Number.isNaN(when.getTime())) return text ?? "";
    return when.toISOString().slice(0, 19).replace("T", " ") + (hasZone ? " UTC" : "");
  };
  eformer.duration = (seconds) => seconds < 100 ? `${Math.max(0, Math.floor(seconds))} s` : seconds < 6000 ? `${Math.floor(seconds / 60)} min`
    : seconds < 48 * 3600 ? `${trim((seconds / 3600).toFixed(1))} h` : `${trim((seconds / 86400).toFixed(1))} days`;
  eformer.ago = (text) => `${eformer.duration((Date.now() - new Date(text)) / 1000)} ago`;
  eformer.shape = (shape) => shape.length ? shape.join(" × ") : "scalar";

  // Make control characters and marks of direction in a name visible, so that they have no effect.
  const hidden = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  eformer.visible = (text) => String(text).replace(hidden, (c) => {
    const code = c.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
  // The parts of a path, unescaped: see record/names.py and record/outline.py.
  eformer.label = (part) => !part.includes("%") ? part : part.split(".").map((one) => {
    if (one.startsWith("%*")) return unescape(one.slice(2)).replace(/(\d+)-(\d+)/, "$1–$2");
    if (one === "%=") return "(itself)";
    if (one === "%") return "(the only leaf)";
    if (one.startsWith("%@")) return unescape(one.slice(2)) || "(no prefix)";
    return unescape(one);
  }).join(".");
  const unescape = (part) => {
    if (!part.includes("%")) return part;
    const text = part.replace(/(%\+\w+)?(%#[1-9][0-9]*)?$/, "");
    if (text === "%_") return "(empty)";
    return text.replace(/%(?:([0-9A-F]{2})|u(D[89A-F][0-9A-F]{2}))/g, (_, a, b) => String.fromCharCode(parseInt(a ?? b, 16)));
  };
  eformer.isFolded = (part) => /(^|\.)%\*/.test(part);
  // The path of a leaf without the parts that only rows have.
  eformer.leafPath = (path) => path.includes("%")
    ? path.split(".").filter((part) => !part.startsWith("%*") && part !== "%=").join(".") : path;

  // Make an element: h("a.class", {attributes and properties}, ...children). Text is never parsed as markup.
  eformer.h = (what, ...rest) => element(document.createElement(what.split(".")[0]), what, rest);
  eformer.s = (what, ...rest) =>
    element(document.createElementNS("http://www.w3.org/2000/svg", what.split(".")[0]), what, rest);
  const element = (made, what, rest) => {
    const classes = what.split(".").slice(1);
    if (classes.length) made.setAttribute("class", classes.join(" "));
    if (rest.length && rest[0] !== null && typeof rest[0] === "object" && !(rest[0] instanceof Node) && !Array.isArray(rest[0]))
      for (const [name, value] of Object.entries(rest.shift())) {
        if (value === undefined || value === null || value === false) continue;
        if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
        else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
        else made.setAttribute(name, value === true ? "" : value);
      }
    for (const child of rest.flat(3)) if (child !== null && child !== undefined && child !== false) made.append(child);
    return made;
  };
  // A name: isolated, so that its direction does not affect the text beside it, and breakable after its dots.
  eformer.name = (text, options = {}) => {
    const made = eformer.h("bdi.name", options);
    for (const [n, part] of eformer.visible(text).split(".").entries()) {
      if (n) made.append(".", eformer.h("wbr"));
      made.append(part);
    }
    return made;
  };

  // A number with its label, and the state of a checkpoint or a run.
  eformer.stat = (label, value, more, shade = "") => eformer.h(`div.stat${shade ? "." + shade : ""}`, eformer.h("dt", label),
    eformer.h("dd", eformer.h("span.big", value), more ? eformer.h("span.muted.small", more) : null));
  eformer.state = (shade, sign, words, text, options = {}) => eformer.h(`div.state.${shade}`, { id: "verification", ...options },
    eformer.h("span.sign", { "aria-hidden": "true" }, sign), eformer.h("span", eformer.h("b", words), eformer.h("span.explain", text)));

  // ---------------------------------------------------------------------------------------------- theme
  const icons = {
    auto: "M12 3a9 9 0 1 0 0 18a9 9 0 0 0 0-18zm0 2v14a7 7 0 0 1 0-14z",
    light: "M12 8a4 4 0 1 0 0 8a4 4 0 0 0 0-8zM11 2h2v3h-2zM11 19h2v3h-2zM2 11h3v2H2zM19 11h3v2h-3zM4.2 5.6l1.4-1.4 2.1 2.1-1.4 1.4zM16.3 17.7l1.4-1.4 2.1 2.1-1.4 1.4zM4.2 18.4l2.1-2.1 1.4 1.4-2.1 2.1zM16.3 6.3l2.1-2.1 1.4 1.4-2.1 2.1z",
    dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  };
  const names = { auto: "as the system", light: "light", dark: "dark" };
  eformer.themeButton = () => {
    let theme = document.documentElement.dataset.theme ?? "auto";  // a page that is drawn again keeps it
    try { theme = localStorage.getItem("eformer-theme") ?? theme; } catch { /* a frame may not */ }
    if (!(theme in icons)) theme = "auto";
    const path = eformer.s("path");
    const button = eformer.h("button.icon", { type: "button", id: "theme", onclick: () => {
      const all = Object.keys(icons);
      theme = all[(all.indexOf(theme) + 1) % all.length];
      try { localStorage.setItem("eformer-theme", theme); } catch { /* a frame may not */ }
      show();
    } }, eformer.s("svg", { viewBox: "0 0 24 24", width: 18, height: 18, "aria-hidden": "true" }, path));
    const show = () => {
      document.documentElement.dataset.theme = theme;
      path.setAttribute("d", icons[theme]);
      button.setAttribute("aria-label", `Colours: ${names[theme]}. Change`);
      button.title = `Colours: ${names[theme]}`;
    };
    show();
    return button;
  };
  eformer.fail = (error) => {
    const app = document.getElementById("app");
    app.removeAttribute("aria-busy");
    app.prepend(eformer.h("p.failed", { role: "alert" }, `This page could not be drawn: ${error.message ?? error}`));
    throw error;
  };
})();
