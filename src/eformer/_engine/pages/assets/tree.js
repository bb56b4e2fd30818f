// The tree of a checkpoint as a treegrid, of which only the visible rows are drawn, and its search.
"use strict";
(() => {
  const { h, bytes, count, number } = eformer;
  const ROW = 28, HEAD = 33, MARGIN = 12;

  eformer.tree = (source, summary, { onSelect }) => {
    const columns = [
      { id: "name", text: "Name", sort: "name" },
      { id: "dtype", text: "dtype", sort: "dtype" },
      { id: "shape", text: "Shape" },
      { id: "params", text: "Params", sort: "params", isNumber: true },
      { id: "nbytes", text: "Size", sort: "nbytes", isNumber: true },
      ...(summary.has_values ? [{ id: "spark", text: "Distribution" }, { id: "std", text: "Std", sort: "std", isNumber: true }] : []),
      ...(summary.against ? [{ id: "change", text: "Change", sort: "change", isNumber: true }] : []),
    ];
    let order = { sort: "", descending: false };
    let query = "", filter = "";
    let lines = [];  // the unfolded rows from top to bottom: {row, level, at, of}, with the place among `of` siblings
    let active = -1, selected = null, frame = 0;
    const opened = new Set();  // groups
    let inOrder = new Map();  // the sorted rows below a group, or of a query

    // -------------------------------------------------------------------------------------- rows
    const once = (key, list) => {
      if (!inOrder.has(key)) inOrder.set(key, list());
      return inOrder.get(key);
    };
    const below = (group) => once(group, () => source.children(group, order));
    const flatten = () => {
      const before = lines[active]?.row;
      lines = [];
      const walk = (rows, level) => rows.forEach((row, at) => {
        lines.push({ row, level, at, of: rows.length });
        if (opened.has(row)) walk(below(row), level + 1);
      });
      const isFlat = Boolean(query || filter);
      walk(isFlat ? once(`${filter} ${query}`, () => source.search(query, order, filter)) : below(source.root), 0);
      if (before) { const now = lines.findIndex((line) => line.row === before); if (now >= 0) active = now; }
      if (active >= lines.length) active = lines.length - 1;
      spacer.style.height = `${lines.length * ROW}px`;
      grid.setAttribute("aria-rowcount", String(lines.length + 1));
      grid.classList.toggle("searching", isFlat);
      status.replaceChildren(isFlat ? `${eformer.many(lines.length, "leaf", "leaves")} found` : eformer.many(summary.leaves, "leaf", "leaves"));
      const hint = query && !lines.length && source.hint(query, filter);
      if (hint) status.append(": try ", h("button.link.mono", { type: "button", onclick: () => { input.value = hint; search(hint); } }, eformer.visible(hint)));
      draw();
    };
    const open = (row) => { opened.add(row); flatten(); };
    const close = (row) => { opened.delete(row); flatten(); };
    const toggle = (row) => { if (row.kind === "group") opened.has(row) ? close(row) : open(row); };

    // -------------------------------------------------------------------------------------- draw
    const head = h("div.row.head", { role: "row", "aria-rowindex": "1" }, columns.map((column) => {
      const cell = h(`div.cell.${column.id}`, { role: "columnheader", class: `cell ${column.id}${column.isNumber ? " num" : ""}` });
      if (column.sort) cell.append(h("button.sort", { type: "button", tabindex: "-1", onclick: () => sortBy(column) }, column.text));
      else cell.append(column.text);
      column.cell = cell;
      return cell;
    }));
    const body = h("div.rows", { role: "rowgroup" });
    const spacer = h("div.spacer", body);
    const scroller = h("div.scroller", h("div.heads", { role: "rowgroup" }, head), spacer);
    const grid = h("div.grid", { role: "treegrid", tabindex: "0", "aria-label": "Leaves of the checkpoint", class: `grid cols${columns.length}` }, scroller);
    if (summary.against) grid.classList.add("with-change");
    if (summary.has_values) grid.classList.add("with-values");
    const status = h("p.small.muted.status", { role: "status", "aria-live": "polite" });

    const draw = () => { if (!frame) frame = requestAnimationFrame(() => { frame = 0; render(); }); };
    const render = (all = false) => {
      const first = all ? 0 : Math.max(0, Math.floor(scroller.scrollTop / ROW) - MARGIN);
      const last = all ? Math.min(lines.length, 5000) : Math.min(lines.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / ROW) + MARGIN);
      body.style.transform = `translateY(${first * ROW}px)`;
      const made = [];
      for (let n = first; n < last; n++) made.push(rowElement(lines[n], n));
      body.replaceChildren(...made);
      showGroup();
      if (active >= first && active < last) grid.setAttribute("aria-activedescendant", `row-${active}`);
      else grid.removeAttribute("aria-activedescendant");
    };

    // The group of the active row, or of the first row that is seen.
    const where = h("nav.crumbs.where", { "aria-label": "Group of the rows" });
    let shownGroup;
    const showGroup = () => {
      const top = Math.round(scroller.scrollTop / ROW), isSeen = active >= top && active * ROW < scroller.scrollTop + scroller.clientHeight - HEAD;
      const group = query || filter ? null : lines[isSeen ? active : top]?.row.parent ?? source.root;
      if (group !== shownGroup) where.replaceChildren(...group ? eformer.crumbs(group, toRow) : [h("span.muted", "Leaves of all groups")]);
      shownGroup = group;
    };
    const toRow = (row) => { activate(lines.findIndex((line) => line.row === row)); scroller.scrollTop = Math.max(0, active) * ROW * Number(row !== source.root); };

    const rowElement = ({ row, level, at, of }, n) => {
      const made = h("div.row", { role: "row", id: `row-${n}`, "data-n": n, "aria-rowindex": n + 2, "aria-level": level + 1,
        "aria-posinset": at + 1, "aria-setsize": of });
      if (row.kind === "group") made.setAttribute("aria-expanded", String(opened.has(row)));
      made.setAttribute("aria-selected", String(selected === row));
      made.classList.toggle("active", n === active);
      made.classList.toggle("damaged", row.damaged);
      made.classList.toggle("is-group", row.kind === "group");
      for (const column of columns)
        made.append(h(`div.cell.${column.id}`, { role: "gridcell", class: `cell ${column.id}${column.isNumber ? " num" : ""}` }, cells[column.id](row, level)));
      return made;
    };

    const cells = {
      name: (row, level) => {
        const label = eformer.visible(eformer.label(query || filter ? row.path : row.name));
        const made = [h("span.indent", { style: { "--level": level } }),
          h("span.twisty", { "aria-hidden": "true", "data-twisty": row.kind === "group" }, row.kind === "group" ? (opened.has(row) ? "▾" : "▸") : ""),
          h("bdi.text", { title: label }, marked(label))];
        if (row.count) made.push(h("span.badge", `×${row.count}`));
        if (row.damaged) made.push(h("span.flag.bad", row.kind === "leaf" ? "damaged" : "has damage"));
        else if (row.problem) made.push(h("span.flag", "not read"));
        if (row.special) made.push(h(`span.flag.${eformer.became(row.change) ? "bad" : "warn"}`, { title: `${count(row.special)} NaN or infinite` }, "NaN/Inf"));
        if (row.value !== undefined) made.push(h("span.value.muted", h("bdi", `= ${eformer.visible(row.value)}`)));
        return made;
      },
      dtype: (row) => {
        const [first = "", ...more] = row.dtypes.filter(Boolean).map(eformer.visible);
        return h("span.mono", { title: [first, ...more].join(", ") }, row.value !== undefined ? "value" : first + (more.length ? ` +${more.length}` : ""));
      },
      shape: (row) => row.shape && row.value === undefined ? h("span.mono", eformer.shape(row.shape)) : h("span.muted", row.kind === "group" ? eformer.many(row.leaves, "leaf", "leaves") : ""),
      params: (row) => row.value !== undefined ? "" : eformer.amount(row.params),
      nbytes: (row) => [row.nbytes > 0.08 * summary.nbytes ? h("span.share", { style: { width: `${(100 * row.nbytes) / Math.max(1, summary.nbytes)}%` } }) : null, h("span", row.value !== undefined ? "" : bytes(row.nbytes))],
      spark: (row) => { const found = source.statistics(row)?.histogram; return found ? eformer.sparkline(found.counts) : ""; },
      std: (row) => { const found = source.statistics(row); return found?.histogram ? number(found.std, 3, { isColumn: true }) : ""; },
      change: (row) => row.change ? h("span", { title: eformer.changeText(row.change), class: `delta ${eformer.became(row.change) ? "became" : row.change.status}`, style: { "--heat-at": String(eformer.heat(row.change)) } },
        eformer.changeText(row.change)) : "",
    };
    const marked = (label) => {
      const [start, end] = query && eformer.finder(query)(label.toLowerCase()) || [0, 0];
      return [label.slice(0, start), h("mark", label.slice(start, end)), label.slice(end)];
    };

    // ------------------------------------------------------------------------------------- order
    const sortBy = (column) => {
      const starts = column.isNumber;
      if (order.sort !== column.sort) order = { sort: column.sort, descending: starts };
      else if (order.descending === starts) order = { sort: column.sort, descending: !starts };
      else order = { sort: "", descending: false };
      for (const one of columns) {
        const isIt = one.sort && one.sort === order.sort;
        if (one.sort) one.cell.setAttribute("aria-sort", isIt ? order.descending ? "descending" : "ascending" : "none");
      }
      active = lines.length ? 0 : -1;
      scroller.scrollTop = 0;
      unfolded = null;
      inOrder = new Map();
      flatten();
    };
    for (const column of columns) if (column.sort) column.cell.setAttribute("aria-sort", "none");

    // ------------------------------------------------------------------------------------ search
    const input = h("input", { type: "search", id: "search", placeholder: "Search names: text, or a pattern like *.bias", "aria-label": "Search leaves by name", autocomplete: "off", spellcheck: "false" });
    let waiting = 0;
    input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => search(input.value), 60); });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { if (input.value) { input.value = ""; search(""); } else if (filter) showOnly(filter); else input.blur(); event.stopPropagation(); }
      if (event.key === "ArrowDown" || event.key === "Enter") { grid.focus(); activate(Math.max(0, active)); if (event.key === "Enter") choose(); event.preventDefault(); }
    });
    let unfolded = null;  // the active row and the scroll position before the search
    const search = (text, only = filter) => {
      clearTimeout(waiting);
      if (!query && !filter) unfolded = { active, top: scroller.scrollTop };
      [query, filter] = [text.trim() ? text : "", only];
      inOrder.delete(`${filter} ${query}`);
      showFilters();
      const place = query || filter ? { active: 0, top: 0 } : unfolded ?? { active: -1, top: 0 };
      lines = [];
      active = place.active;
      flatten();
      scroller.scrollTop = place.top;
    };

    // Filters are shown with the number of their leaves, if it is not zero.
    const names = { became: "became NaN or Inf", special: "NaN or Inf", damaged: "damaged", changed: "changed", zero: "all zero" };
    const filters = h("div.chips", { role: "group", "aria-label": "Filters" });
    const showOnly = (name) => search(query, filter === name ? "" : name);
    const showFilters = () => {
      const focused = document.activeElement?.dataset.filter, counts = source.counts();
      filters.replaceChildren(...Object.keys(names).filter((name) => counts[name] || filter === name).map((name) =>
        h(`button.chip.${name}`, { type: "button", "data-filter": name, "aria-pressed": String(filter === name), onclick: () => showOnly(name) }, h("b", count(counts[name])), ` ${names[name]}`)));
      if (focused) filters.querySelector(`[data-filter="${focused}"]`)?.focus();
    };

    // ---------------------------------------------------------------------------------- keyboard
    const activate = (n) => {
      if (n < 0 || n >= lines.length) return;
      active = n;
      const top = n * ROW;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top + ROW > scroller.scrollTop + scroller.clientHeight - HEAD) scroller.scrollTop = top + ROW - scroller.clientHeight + HEAD;
      render();
    };
    const choose = () => {
      if (!lines[active]) return;
      selected = lines[active].row;
      draw();
      onSelect(selected);
    };
    const keys = {
      ArrowDown: () => activate(active + 1),
      ArrowUp: () => activate(Math.max(0, active - 1)),
      Home: () => activate(0),
      End: () => activate(lines.length - 1),
      PageDown: () => activate(Math.min(lines.length - 1, active + Math.floor(scroller.clientHeight / ROW) - 1)),
      PageUp: () => activate(Math.max(0, active - Math.floor(scroller.clientHeight / ROW) + 1)),
      ArrowRight: () => {
        const row = lines[active]?.row;
        if (row?.kind !== "group") return;
        if (opened.has(row)) activate(active + 1); else open(row);
      },
      ArrowLeft: () => {
        const line = lines[active];
        if (line && opened.has(line.row)) close(line.row);
        else if (line?.level) activate(lines.findIndex((one) => one.row === line.row.parent));
      },
      Enter: () => {
        choose();
        if (lines[active]) toggle(lines[active].row);
      },
      " ": () => choose(),
      "*": () => {
        for (const row of lines[active]?.row.parent.kids ?? []) if (row.kind === "group") opened.add(row);
        flatten();
      },
    };
    grid.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
    grid.addEventListener("focus", () => { if (active < 0 && lines.length) activate(0); });
    body.addEventListener("click", (event) => {
      const target = event.target.closest(".row");
      if (!target) return;
      active = Number(target.dataset.n);
      choose();
      if (lines[active]) toggle(lines[active].row);
    });
    let scrolled = 0;
    scroller.addEventListener("scroll", () => { if (scroller.scrollTop !== scrolled) { scrolled = scroller.scrollTop; draw(); } }, { passive: true });
    new ResizeObserver(() => draw()).observe(scroller);
    addEventListener("beforeprint", () => render(true));
    addEventListener("afterprint", () => render());

    // ------------------------------------------------------------------------------------ reveal
    // Unfold the tree down to a leaf or a group, and make it the active row.
    const reveal = (path, kind, { select = true } = {}) => {
      if (query || filter) { input.value = ""; search("", ""); }
      const row = source.find(path, kind);
      if (!row) return;
      for (let up = row.parent; up; up = up.parent) opened.add(up);
      flatten();
      const at = lines.findIndex((line) => line.row === row);
      if (select) selected = row;
      activate(at);
      scroller.scrollTop = Math.max(0, (at - Math.floor(scroller.clientHeight / ROW / 2)) * ROW);
    };

    // Open a few groups at the start, as long as everything fits.
    const start = () => {
      showFilters();
      flatten();
      for (let depth = 0; depth < 4 && lines.length === depth + 1 && lines[depth].row.kind === "group"; depth++) open(lines[depth].row);
      for (const row of below(source.root)) if (row.kind === "group" && lines.length < 10) open(row);
    };
    return { grid, input, status, filters, where, start, reveal, draw, showFilters, showOnly: (name) => { if (filter !== name) showOnly(name); } };
  };
})();
