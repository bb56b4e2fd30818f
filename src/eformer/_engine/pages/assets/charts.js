// Charts: bars of dtypes, treemap, histogram, sharding, heat map. Each has a description for screen readers.
"use strict";
(() => {
  const { h, s, bytes, count, many, number, percent } = eformer;

  // ----------------------------------------------------------------------------------------- tooltip
  let tip = null;
  const place = (x, y) => {
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 10) : y + 18}px`;
  };
  const show = (lines, x, y) => {
    if (!tip) document.body.append(tip = h("div.tip", { "aria-hidden": "true" }));
    tip.replaceChildren(...lines.filter(Boolean).map((line, n) => h(n ? "div.more" : "div", line)));
    tip.hidden = false;
    place(x, y);
  };
  eformer.hideTip = () => { if (tip) tip.hidden = true; };
  // Show lines of text beside an element under the pointer or with the focus. `of` returns them for an event's target.
  eformer.tips = (element, of) => {
    const at = (event) => of(event.target.closest("[data-tip]"));
    element.addEventListener("pointermove", (event) => {
      const lines = at(event);
      if (lines) show(lines, event.clientX, event.clientY); else eformer.hideTip();
    });
    element.addEventListener("pointerleave", eformer.hideTip);
    element.addEventListener("focusin", (event) => {
      const lines = event.target.matches(":focus-visible") && at(event);
      if (!lines) return;
      const box = event.target.getBoundingClientRect();
      show(lines, box.left + box.width / 2, box.bottom - 12);
    });
    element.addEventListener("focusout", eformer.hideTip);
  };

  // ------------------------------------------------------------------------------------------ dtypes
  eformer.colourOf = (n) => `var(--c${n % 8})`;

  eformer.dtypeBars = (dtypes, total) => {
    const shown = dtypes.filter((one) => one.nbytes > 0);
    const bar = h("div.stack", { role: "img", "aria-label": "Bytes by dtype: "
      + shown.map((one) => `${one.dtype} ${bytes(one.nbytes)}`).join(", ") },
      shown.map((one, n) => h("span", { "data-tip": n, style: { "flex-grow": String(one.nbytes), "background": eformer.colourOf(n) } })));
    eformer.tips(bar, (target) => target && [shown[target.dataset.tip].dtype,
      `${bytes(shown[target.dataset.tip].nbytes)}, ${percent(shown[target.dataset.tip].nbytes / total)}`,
      many(shown[target.dataset.tip].leaves, "array")]);
    const most = 6;
    const keys = shown.slice(0, most).map((one, n) => h("li", h("i.key", { style: { background: eformer.colourOf(n) } }),
      h("span.mono", eformer.visible(one.dtype)), " ", h("span.muted", bytes(one.nbytes))));
    if (shown.length > most) keys.push(h("li.muted", `and ${shown.length - most} more`));
    return h("div.dtypes", bar, h("ul.keys", keys));
  };

  // ----------------------------------------------------------------------------------------- treemap
  // Squarified: rows of tiles that are as square as possible. Areas are in proportion to `nbytes`.
  const squarified = (items, box) => {
    const total = items.reduce((sum, item) => sum + item.nbytes, 0);
    const scale = total ? (box.w * box.h) / total : 0;
    const placed = [];
    let { x, y, w, h: high } = box, n = 0;
    while (n < items.length && w > 0 && high > 0) {
      const side = Math.min(w, high);
      let end = n + 1, area = items[n].nbytes * scale;
      const worst = (first, last, sum) => Math.max(
        (side * side * items[first].nbytes * scale) / (sum * sum), (sum * sum) / (side * side * items[last].nbytes * scale));
      while (end < items.length) {
        const next = area + items[end].nbytes * scale;
        if (worst(n, end, next) > worst(n, end - 1, area)) break;
        area = next;
        end++;
      }
      const depth = area / side;
      let along = 0;
      for (let k = n; k < end; k++) {
        const length = (items[k].nbytes * scale) / depth;
        placed.push(w >= high ? { item: items[k], x, y: y + along, w: depth, h: length }
          : { item: items[k], x: x + along, y, w: length, h: depth });
        along += length;
      }
      if (w >= high) { x += depth; w -= depth; } else { y += depth; high -= depth; }
      n = end;
    }
    return placed;
  };

  // The groups above a row and the row itself, as links but for the last.
  eformer.crumbs = (row, onPick) => {
    const above = [];
    for (let up = row; up; up = up.parent) above.unshift(up);
    return above.map((one, n) => {
      const text = h("bdi", n ? eformer.visible(eformer.label(one.name)) : "all");
      return h("span", n ? h("span.muted", { "aria-hidden": "true" }, " › ") : null, one === row ? h("b", { "aria-current": "location" }, text)
        : h("button.link", { type: "button", onclick: () => onPick(one) }, text));
    });
  };

  // The box next to one of several boxes in a direction, such as [1, 0] for the right.
  const nextBox = (from, boxes, [dx, dy]) => {
    const far = (box) => {
      const along = dx ? dx * (box.x - from.x) + (dx > 0 ? -from.w : -box.w) : dy * (box.y - from.y) + (dy > 0 ? -from.h : -box.h);
      const beside = dx ? Math.max(box.y - from.y - from.h, from.y - box.y - box.h) : Math.max(box.x - from.x - from.w, from.x - box.x - box.w);
      return along < -1 ? Infinity : along + 3 * Math.max(0, beside);
    };
    const best = boxes.filter((box) => box !== from).reduce((best, box) => best && far(best) <= far(box) ? best : box, null);
    return best && far(best) < Infinity ? best : null;
  };

  eformer.treemap = (source, summary, { onLeaf, onGroup }) => {
    const map = h("div.treemap", { role: "group", "aria-label": "Treemap of bytes: arrow keys go from tile to tile, Enter opens, Escape goes back" });
    const crumbs = h("nav.crumbs", { "aria-label": "Path in the treemap" });
    const modes = [["module", "module"], ["dtype", "dtype"], ...(summary.against ? [["change", "change"]] : [])];
    const choice = h("select", { id: "colour", "aria-label": "Colour of the treemap", onchange: () => draw() },
      modes.map(([value, text]) => h("option", { value }, `by ${text}`)));
    const dtypes = new Map(summary.dtypes.map((one, n) => [one.dtype, n]));
    const kinds = new Map();  // names without their numbers; each has a colour
    let shown = null, tips = [], boxes = [];  // of each tile: its text, and {x, y, w, h, made, frame}

    const paint = (made, item) => {
      if (choice.value === "change") {
        made.classList.add("heated", eformer.shadeOf(item.change) || "by-heat");
        made.style.setProperty("--heat-at", eformer.heat(item.change));
        return;
      }
      if (item.kind === "rest") return;
      const kind = eformer.label(item.name).replace(/\d+/g, "");
      if (!kinds.has(kind)) kinds.set(kind, kinds.size);
      made.style.setProperty("--tile", eformer.colourOf(choice.value === "dtype" ? dtypes.get(item.dtype) ?? 7 : kinds.get(kind)));
    };
    const words = (item) => [item.kind === "rest" ? item.name : eformer.visible(eformer.label(item.path || item.name)),
      `${bytes(item.nbytes)}, ${percent(item.nbytes / Math.max(1, summary.nbytes))} of all`,
      item.kind === "group" ? many(item.leaves, "leaf", "leaves") : item.dtype || null,
      summary.against && item.change ? `change: ${eformer.changeText(item.change)}` : null];

    // Draw a tile, and the tiles inside of it where they fit. A tile with tiles inside is only a frame.
    const tiles = ({ item, x, y, w, h: high }, into, depth = 0, frame = null) => {
      if (w < 3 || high < 3) return;
      const isFrame = depth < 3 && item.kids.length > 0 && w > 44 && high > 46;
      const made = h(`button.tile${isFrame ? ".frame" : ""}`, { type: "button", tabindex: tips.length ? "-1" : "0", "data-tip": tips.length, "data-path": item.kind === "rest" && item.path === shown.path ? null : item.path, "data-kind": item.kind, "data-bytes": item.nbytes,
        "aria-label": words(item).filter(Boolean).join(", ") + { group: ". Opens", leaf: ". Shows the leaf", rest: item.path === shown.path ? "" : ". Opens the group" }[item.kind],
        style: { left: `${x}px`, top: `${y}px`, width: `${w - 2}px`, height: `${high - 2}px` } });
      tips.push(words(item));
      const box = { x, y, w, h: high, made, frame };
      boxes.push(box);
      if (!isFrame) paint(made, item);
      if (eformer.became(item.change)) made.classList.add("alarm");  // in every colouring: an inner tile may be too small to see
      if (w > 30 && high > 16) {
        const label = h("span.label", h("bdi", eformer.visible(eformer.label(item.name))));
        if (item.count > 1) label.append(h("span.times", ` ×${item.count}`));
        if (w > 130) label.append(h("span.size", bytes(item.nbytes)));
        made.append(label);
      }
      into.push(made);
      if (isFrame) for (const small of squarified(source.largest(item, 24), { x: x + 3, y: y + 20, w: w - 6, h: high - 23 })) tiles(small, into, depth + 1, box);
    };

    const draw = () => {
      if (!shown) return;
      const made = [];
      tips = [];
      boxes = [];
      for (const placed of squarified(source.largest(shown, 240), { x: 0, y: 0, w: map.clientWidth + 2, h: map.clientHeight + 2 })) tiles(placed, made);
      map.replaceChildren(...made);
      if (!made.length) map.append(h("p.muted.empty", "No bytes here."));
      crumbs.replaceChildren(...eformer.crumbs(shown, (one) => zoom(one.path)), h("span.muted", ` ${bytes(shown.nbytes)}`));
    };
    const zoom = (path, { focus = false } = {}) => {
      shown = source.find(path, "group");
      draw();
      if (focus) map.querySelector("button")?.focus();
    };
    map.addEventListener("click", (event) => {
      const target = event.target.closest("[data-path]");  // the rest of the group that is shown has none
      if (!target) return;
      const { path, kind } = target.dataset;
      eformer.hideTip();
      if (kind === "leaf") onLeaf(path);
      else { zoom(path, { focus: event.detail === 0 }); onGroup(path); }
    });
    // One tile can be reached by Tab: the last that had the focus. Arrows go to the next tile in the same frame, or from the frame.
    const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    map.addEventListener("focusin", (event) => {
      map.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
      event.target.setAttribute("tabindex", "0");
    });
    map.addEventListener("keydown", (event) => {
      const direction = directions[event.key], from = boxes.find((box) => box.made === event.target);
      if (direction && from) {
        event.preventDefault();
        let next = null;
        for (let at = from; at && !next; at = at.frame) next = nextBox(at, boxes.filter((box) => box.frame === at.frame), direction);
        next?.made.focus();
        return;
      }
      if ((event.key === "Escape" || event.key === "Backspace") && shown?.parent) {
        zoom(shown.parent.path, { focus: true });
        event.preventDefault();
        event.stopPropagation();
      }
    });
    eformer.tips(map, (target) => target && tips[target.dataset.tip]);
    let width = 0;
    new ResizeObserver(() => { if (map.clientWidth !== width) { width = map.clientWidth; draw(); } }).observe(map);
    addEventListener("beforeprint", draw);
    return { map, crumbs, choice, zoom, draw };
  };

  // --------------------------------------------------------------------------------------- histogram
  eformer.sparkline = (bins, { width = 84, height = 20 } = {}) => {
    const most = Math.max(...bins);
    const step = width / bins.length;
    let path = bins.length === 1 ? `M${width / 2 - 1.5} ${height}v${-height}h3v${height}z` : "";
    if (bins.length > 1) bins.forEach((n, k) => {
      if (!n) return;
      const tall = Math.max(0.8, (n / most) * height);
      path += `M${(k * step).toFixed(1)} ${height}v${-tall.toFixed(1)}h${Math.max(0.5, step - (bins.length > 1 ? 0.3 : 0)).toFixed(2)}v${tall.toFixed(1)}z`;
    });
    return s("svg.spark", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, s("path", { d: path }));
  };

  const edges = (histogram) => {
    const { low, high, counts, scale } = histogram;
    return Array.from({ length: counts.length + 1 }, (_, n) => scale === "log"
      ? Math.exp(Math.log(low) + (Math.log(high) - Math.log(low)) * n / counts.length) : low + (high - low) * n / counts.length);
  };

  eformer.histogram = (statistics) => {
    const found = statistics.histogram;
    if (!found) return null;
    const width = 320, height = 116, most = Math.max(...found.counts), total = statistics.size;
    const at = edges(found);
    const isOne = found.low === found.high;
    const step = width / found.counts.length;
    const drawn = (isLog) => found.counts.map((n, k) => {
      const part = n === 0 ? 0 : isLog ? (Math.log10(n) + 0.3) / (Math.log10(most) + 0.3) : n / most;
      const tall = n ? Math.max(1, part * height) : 0;
      return s("rect.bin", { "data-tip": k, x: isOne ? width / 2 - 8 : k * step, y: height - tall, width: isOne ? 16 : Math.max(0.6, step - 0.8), height: tall });
    });
    const place = (value) => found.scale === "log"
      ? (Math.log(value) - Math.log(found.low)) / (Math.log(found.high) - Math.log(found.low)) : (value - found.low) / (found.high - found.low);
    const bars = s("g", drawn(false));
    const hit = s("g", found.counts.map((_, k) => s("rect.hit", { "data-tip": k, x: k * step, y: 0, width: step, height })));
    const picture = s("svg.histogram", { viewBox: `0 0 ${width} ${height + 1}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `Histogram of ${count(total)} elements from ${number(found.low)} to ${number(found.high)}, ${found.scale} axis` },
      s("line.axis", { x1: 0, x2: width, y1: height + 0.5, y2: height + 0.5 }), bars);
    const mean = statistics.mean;
    if (!isOne && typeof mean === "number" && mean > found.low && mean < found.high && place(mean) >= 0)
      picture.append(s("line.mean", { x1: place(mean) * width, x2: place(mean) * width, y1: 0, y2: height }));
    picture.append(hit);
    eformer.tips(picture, (target) => {
      if (!target) return null;
      const k = Number(target.dataset.tip), n = found.counts[k];
      return [isOne ? number(found.low) : `${number(at[k])} to ${number(at[k + 1])}`, `${percent(n / total)}, about ${count(n)}`];
    });
    const middle = found.scale === "log" ? null : found.low < 0 && found.high > 0 && place(0) > 0.2 && place(0) < 0.8
      ? h("span", { style: { left: `${place(0) * 100}%` } }, "0") : null;
    const axis = h("div.axis-labels", { "aria-hidden": "true" }, isOne
      ? h("span", { style: { left: "50%" } }, number(found.low))
      : [h("span.first", number(found.low)), middle, h("span.last", number(found.high))]);
    const outside = [found.below ? `${count(found.below)} below` : null, found.above ? `${count(found.above)} above` : null].filter(Boolean);
    const scale = h("button.link.small", { type: "button", "aria-pressed": "false", onclick: () => {
      const isLog = scale.getAttribute("aria-pressed") !== "true";
      scale.setAttribute("aria-pressed", String(isLog));
      bars.replaceChildren(...drawn(isLog));
    } }, "log counts");
    const table = h("details.alternative", h("summary", "as a table"));
    table.addEventListener("toggle", () => {
      if (table.open && !table.querySelector("table"))
        table.append(h("table", h("thead", h("tr", h("th", { scope: "col" }, "from"), h("th", { scope: "col" }, "to"), h("th", { scope: "col" }, "elements"))),
          h("tbody", found.counts.map((n, k) => h("tr", h("td", number(at[k], 5)), h("td", number(at[k + 1], 5)), h("td", count(n)))))));
    });
    return h("figure.distribution", picture, axis,
      h("figcaption.small.muted", found.scale === "log" ? "logarithmic axis" : "linear axis",
        outside.length ? ` · outside: ${outside.join(", ")}` : null, " · ", scale, table));
  };

  // ---------------------------------------------------------------------------------------- sharding
  // The device of each box. Devices are numbered along the mesh, the last axis fastest, because the record does not
  // have their ids.
  const boxesOf = (leaf) => {
    const { spec, mesh } = leaf.sharding;
    const sizes = new Map(mesh);
    const cuts = leaf.shape.map((_, axis) => (spec[axis] ?? []).reduce((n, name) => n * (sizes.get(name) ?? 1), 1));
    const devices = mesh.reduce((n, [, size]) => n * size, 1);
    const used = new Set(spec.flat());
    const copies = mesh.reduce((n, [name, size]) => used.has(name) ? n : n * size, 1);
    const holders = new Map();
    if (devices <= 4096)
      for (let device = 0; device < devices; device++) {
        const where = {};
        let left = device;
        for (const [name, size] of [...mesh].reverse()) { where[name] = left % size; left = Math.floor(left / size); }
        const cell = leaf.shape.map((_, axis) => (spec[axis] ?? []).reduce((n, name) => n * sizes.get(name) + where[name], 0)).join(",");
        holders.set(cell, [...holders.get(cell) ?? [], device]);
      }
    return { cuts, devices, copies, holders };
  };
  const range = (length, cuts, n) => {
    const size = Math.ceil(length / cuts);
    return [Math.min(length, n * size), Math.min(length, (n + 1) * size)];
  };

  eformer.sharding = (leaf) => {
    if (!leaf.sharding) return null;
    const { cuts, devices, copies, holders } = boxesOf(leaf);
    const mesh = leaf.sharding.mesh;
    const pieces = cuts.reduce((a, b) => a * b, 1);
    const spec = leaf.sharding.spec.map((axes) => axes.length ? axes.length > 1 ? `(${axes.map((a) => `'${a}'`).join(", ")})` : `'${axes[0]}'` : "None").join(", ");
    const words = mesh.length === 0 ? "On one device."
      : pieces === 1 ? `Replicated: each of ${count(devices)} devices holds all of it.`
      : `${count(pieces)} boxes on ${count(devices)} devices` + (copies > 1 ? `; each box is on ${count(copies)} of them (replicated).` : ", one on each.");
    const facts = [h("p.small", eformer.visible(words))];
    if (mesh.length) facts.push(h("p.small.muted.mono", eformer.visible(`P(${spec}) on ${mesh.map(([name, size]) => `${name}=${size}`).join(", ")}`)));
    if (devices > 1) facts.push(h("p.small.muted", `${bytes(leaf.nbytes / pieces)} on each device` + (copies > 1 ? `, ${bytes(leaf.nbytes * copies)} on all` : "")));

    const axes = cuts.map((n, axis) => [n, axis]).filter(([n]) => n > 1).map(([, axis]) => axis);
    let [down, across] = axes.length > 1 ? axes.slice(0, 2) : axes.length === 1
      ? leaf.shape.length > 1 && axes[0] === leaf.shape.length - 1 ? [null, axes[0]] : leaf.shape.length === 1 ? [null, axes[0]] : [axes[0], null] : [null, null];
    const third = axes[2] ?? null;
    const most = 16;
    const rows = down === null ? 1 : cuts[down], columns = across === null ? 1 : cuts[across];
    const slices = third === null ? 1 : Math.min(cuts[third], 4);
    if (!mesh.length || rows > 64 || columns > 64) return h("div.sharding", facts);

    const cellW = Math.max(9, Math.min(74, 300 / columns)), cellH = Math.max(9, Math.min(rows === 1 ? 40 : 30, 168 / rows));
    const tips = [];
    const picture = (slice) => {
      const cells = [];
      for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
        const where = leaf.shape.map((_, axis) => axis === down ? r : axis === across ? c : axis === third ? slice : 0);
        const held = holders.get(where.join(",")) ?? [];
        const box = where.map((n, axis) => range(leaf.shape[axis], cuts[axis], n)).map(([a, b]) => `${a}:${b}`).join(", ");
        const text = held.length > 3 ? `${held[0]}, ${held[1]} …` : held.join(", ");
        const room = cellW > 8 + 6.2 * text.length && cellH > 12;
        tips.push([`[${box}]`, `${held.length === 1 ? "device" : "devices"} ${held.slice(0, 24).join(", ")}${held.length > 24 ? " …" : ""}`]);
        cells.push(s("g.box", { "data-tip": tips.length - 1 },
          s("rect", { x: c * cellW + 0.75, y: r * cellH + 0.75, width: cellW - 1.5, height: cellH - 1.5, rx: 2, style: { "--tile": eformer.colourOf(r * columns + c) } }),
          room ? s("text", { x: (c + 0.5) * cellW, y: (r + 0.5) * cellH + 3.5 }, text) : null));
      }
      const width = columns * cellW, height = rows * cellH;
      return s("svg.grid", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
        "aria-label": `${words} A grid of ${rows} by ${columns} boxes with the numbers of their devices` }, cells);
    };
    const grids = h("div.grids");
    for (let slice = 0; slice < slices; slice++)
      grids.append(h("figure", slices > 1 ? h("figcaption.small.muted", `axis ${third}, box ${slice}`) : null, picture(slice)));
    if (third !== null && cuts[third] > slices) grids.append(h("p.small.muted", `and ${cuts[third] - slices} more along axis ${third}`));
    eformer.tips(grids, (target) => target && tips[target.dataset.tip]);
    const labels = h("p.small.muted", down === null && across === null ? null
      : [down !== null ? `down: axis ${down} (${count(leaf.shape[down])})` : null, across !== null ? `across: axis ${across} (${count(leaf.shape[across])})` : null].filter(Boolean).join(" · "));
    const listed = pieces > 1 && pieces <= 256 ? h("details.alternative.small", h("summary", "as a table"), h("table",
      h("thead", h("tr", h("th", { scope: "col" }, "box"), h("th", { scope: "col" }, "devices"))),
      h("tbody", [...holders].map(([cell, held]) => h("tr", h("td.mono", cell.split(",").map((n, axis) => range(leaf.shape[axis], cuts[axis], Number(n)).join(":")).join(", ")), h("td", held.join(", "))))))) : null;
    return h("div.sharding", facts[0], grids, labels, facts.slice(1), listed);
  };

  // ----------------------------------------------------------------------------------------- changes
  eformer.became = (change) => (change?.became_nan ?? 0) + (change?.became_inf ?? 0);
  eformer.becameText = (change) => `became ${[change.became_nan ? "NaN" : null, change.became_inf ? "Inf" : null].filter(Boolean).join(", ")}`;
  // The class of a change: "became" in the colour of damage, "odd" hatched, "same" empty, and "" by its heat.
  eformer.shadeOf = (change) => eformer.became(change) ? "became" : !change || change.status === "same" ? "same"
    : change.from_zero || change.relative ? "" : "odd";
  eformer.changeText = (change) => {
    if (!change) return "";
    if (eformer.became(change)) return eformer.becameText(change);
    if (change.from_zero) return "from zero";
    if (change.status === "same") return "same";
    if (change.status === "added") return "added";
    if (change.relative === 0) return change.what ? "dtype" : change.unlike ? "NaN or Inf" : change.share ? "bits alone" : "changed";
    if (change.relative !== undefined && change.relative !== null) return percent(change.relative);
    return change.status === "unknown" ? "not read" : "changed";
  };
  // The strength of the colour of a change, 0 to 1: on a logarithmic scale between the ends of `domain`.
  let domain = [1e-4, 1];
  eformer.heatDomain = (found) => {
    const all = found.cells.map((cell) => cell[2]).filter((relative) => relative > 0);
    if (!all.length) return;
    const high = Math.max(...all);
    domain = [Math.min(Math.max(Math.min(...all), high / 1e4), high / 10), high];
  };
  eformer.heat = (change) => {
    const relative = typeof change === "number" ? change : change?.from_zero ? domain[1] : change?.relative;
    if (!relative) return typeof change === "object" && change?.status === "changed" ? 0.04 : 0;
    const [low, high] = domain.map(Math.log10);
    return Math.max(0.04, Math.min(1, (Math.log10(relative) - low) / (high - low)));
  };

  eformer.heatmap = (found, onLeaf) => {
    const { rows, columns, cells, before, after } = found;
    const isStack = found.stack !== "";
    const pathOf = (r, c) => isStack ? `${before}${columns[c]}${after}${rows[r] ? "." + rows[r] : ""}` : rows[r] ? `${rows[r]}.${columns[c]}` : columns[c];
    const table = new Map(cells.map(([r, c, ...rest]) => [`${r},${c}`, rest]));
    const words = (r, c) => {
      const [relative, why] = table.get(`${r},${c}`);
      return relative === null ? why : relative === 0 ? "same" : percent(relative);
    };
    const every = columns.length > 32 ? columns.length > 100 ? 10 : 5 : 1;
    const wide = Math.max(...rows.map((row) => eformer.label(row).length), 6);
    const body = rows.map((row, r) => h("tr", h("th", { scope: "row" }, h("bdi.mono", eformer.visible(eformer.label(row) || "(leaf)"))),
      columns.map((column, c) => {
        const cell = table.get(`${r},${c}`);
        if (!cell) return h("td.none");
        const [relative, , became] = cell;
        return h("td", { class: became ? "became" : relative === null ? "odd" : relative === 0 ? "same" : "", tabindex: "-1", "data-tip": `${r},${c}`,
          style: { "--heat-at": String(eformer.heat(relative ?? 0)) } }, h("span.sr", words(r, c)));
      })));
    const head = h("tr", h("td"), columns.map((column, c) => h("th", { scope: "col", class: !isStack ? "slanted" : columns.length > 12 && c % 5 ? "minor" : "" },
      c % every === 0 || !isStack ? h("bdi.mono", eformer.visible(eformer.label(column))) : h("span.sr", column))));
    const made = h("table.heatmap", { class: `heatmap ${isStack ? "layers" : "modules"}${rows.length <= 12 ? " few" : ""}`, style: { "min-width": `${Math.min(wide, 44) * 7 + 12 + columns.length * (isStack ? 11 : 40)}px` } },
      h("caption.sr", `Relative change of each module, by ${isStack ? "layer" : "leaf"}`),
      h("colgroup", h("col", { style: { width: `${Math.min(wide, 44) * 7 + 12}px` } }), columns.map(() => h("col"))), h("thead", head), h("tbody", body));
    const all = () => [...made.querySelectorAll("td[data-tip]")];
    const first = made.querySelector("td[data-tip]");
    first?.setAttribute("tabindex", "0");
    made.addEventListener("click", (event) => {
      const target = event.target.closest("td[data-tip]");
      if (target) onLeaf(pathOf(...target.dataset.tip.split(",").map(Number)));
    });
    made.addEventListener("keydown", (event) => {
      const target = event.target.closest("td[data-tip]");
      if (!target) return;
      if (event.key === "Enter" || event.key === " ") { target.click(); event.preventDefault(); return; }
      let [r, c] = target.dataset.tip.split(",").map(Number);
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!move) return;
      event.preventDefault();
      for (let n = 0; n < 200; n++) {
        r += move[0]; c += move[1];
        const next = made.querySelector(`td[data-tip="${r},${c}"]`);
        if (next) {
          all().forEach((cell) => cell.setAttribute("tabindex", "-1"));
          next.setAttribute("tabindex", "0");
          next.focus();
          return;
        }
        if (r < 0 || c < 0 || r >= rows.length || c >= columns.length) return;
      }
    });
    if (found.more_rows) made.append(h("tfoot", h("tr", h("td.muted", { colspan: columns.length + 1 }, `and ${many(found.more_rows, "more module")}`))));
    eformer.tips(made, (target) => {
      if (!target) return null;
      const [r, c] = target.dataset.tip.split(",").map(Number);
      return [eformer.visible(eformer.label(pathOf(r, c))), table.get(`${r},${c}`)[2] ? words(r, c) : `relative change: ${words(r, c)}`];
    });
    return made;
  };
  eformer.heatLegend = ({ cells }) => {
    const [low, high] = domain;
    const odd = new Set(cells.filter((cell) => cell[2] === null && !cell[4]).map((cell) => cell[3]));  // hatched
    const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => low * (high / low) ** part);
    return h("div.legend", { role: "img", "aria-label": `Colours: pale for a relative change of ${percent(low)}, strong for ${percent(high)}; red and marked for leaves that became NaN or Inf` },
      h("i.became"), h("span.muted", "became NaN or Inf"), h("i.same"), h("span.muted", "same"), odd.size ? [h("i.odd"), h("span.muted", odd.size > 1 ? "no number" : odd.has("unknown") ? "not read" : [...odd][0])] : null, ...marks.map((one) => [h("i", { style: { "--heat-at": String(eformer.heat(one)) } }), h("span.muted", `${Number((100 * one).toPrecision(2))} %`)]));
  };
})();
