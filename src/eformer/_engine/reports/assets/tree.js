// The tree of a checkpoint as a treegrid: lazy, paged, drawn only where it is seen; and its search.
"use strict";
(() => {
  const { h, bytes, count, number } = eformer;
  const ROW = 28, HEAD = 33, PAGE = 200, MARGIN = 12;

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
    let query = "";
    let root = group("", -1);
    let lines = [];  // what is unfolded, from top to bottom: {up, at, node}
    let active = -1, selected = null, frame = 0;

    function group(path, level, row = null, up = null) {
      return { path, level, row, up, isOpen: false, total: -1, kids: [], asked: new Set() };
    }
    const key = (row) => `${row.kind}:${row.path}`;

    // -------------------------------------------------------------------------------------- rows
    const fetchPage = async (node, page) => {
      if (node.asked.has(page)) return;
      node.asked.add(page);
      const mine = root, options = { offset: page * PAGE, limit: PAGE, ...order };
      const found = query && node === root ? await source.search(query, options) : await source.children(node.path, options);
      if (mine !== root) { node.asked.delete(page); return; }
      node.total = found.total;
      found.rows.forEach((row, n) => { node.kids[page * PAGE + n] = group(row.path, node.level + 1, row, node); });
      flatten();
    };
    const flatten = () => {
      const made = [];
      const walk = (node) => {
        for (let at = 0; at < node.total; at++) {
          const kid = node.kids[at] ?? null;
          made.push({ up: node, at, node: kid });
          if (kid?.isOpen) walk(kid);
        }
      };
      walk(root);
      const before = lines[active]?.node;
      lines = made;
      if (before) { const now = lines.findIndex((line) => line.node === before); if (now >= 0) active = now; }
      if (active >= lines.length) active = lines.length - 1;
      spacer.style.height = `${lines.length * ROW}px`;
      grid.setAttribute("aria-rowcount", String(lines.length + 1));
      draw();
    };
    const open = async (node) => {
      if (node.row?.kind !== "group" || node.isOpen) return;
      node.isOpen = true;
      if (node.total < 0) await fetchPage(node, 0); else flatten();
    };
    const close = (node) => { node.isOpen = false; flatten(); };
    const reload = async () => {
      const opened = new Set();
      const collect = (node) => node.kids.forEach((kid) => { if (kid?.isOpen) { opened.add(kid.path); collect(kid); } });
      if (!query) collect(root);
      root = group("", -1);
      root.isOpen = true;
      await fetchPage(root, 0);
      const reopen = async (node) => {
        for (const kid of node.kids) if (kid && opened.has(kid.path) && kid.row.kind === "group") { await open(kid); await reopen(kid); }
      };
      await reopen(root);
      say();
    };

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
      for (let n = first; n < last; n++) {
        const line = lines[n];
        if (!line.node) fetchPage(line.up, Math.floor(line.at / PAGE));
        made.push(rowElement(line, n));
      }
      body.replaceChildren(...made);
      if (active >= first && active < last) grid.setAttribute("aria-activedescendant", `row-${active}`);
      else grid.removeAttribute("aria-activedescendant");
    };

    const rowElement = (line, n) => {
      const { node } = line;
      const made = h("div.row", { role: "row", id: `row-${n}`, "data-n": n, "aria-rowindex": n + 2, "aria-level": line.up.level + 2,
        "aria-posinset": line.at + 1, "aria-setsize": line.up.total });
      if (!node) { made.append(h("div.cell.name", { role: "gridcell" }, "…")); return made; }
      const { row } = node;
      if (row.kind === "group") made.setAttribute("aria-expanded", String(node.isOpen));
      made.setAttribute("aria-selected", String(selected === key(row)));
      made.classList.toggle("active", n === active);
      made.classList.toggle("damaged", row.damaged);
      made.classList.toggle("is-group", row.kind === "group");
      for (const column of columns)
        made.append(h(`div.cell.${column.id}`, { role: "gridcell", class: `cell ${column.id}${column.isNumber ? " num" : ""}` }, cells[column.id](row, node)));
      return made;
    };

    const cells = {
      name: (row, node) => {
        const label = eformer.visible(eformer.label(row.name));
        const made = [h("span.indent", { style: { width: `${node.level * 16}px` } }),
          h("span.twisty", { "aria-hidden": "true", "data-twisty": row.kind === "group" }, row.kind === "group" ? (node.isOpen ? "▾" : "▸") : ""),
          h("bdi.text", { title: label }, marked(label))];
        if (row.count) made.push(h("span.badge", `×${row.count}`));
        if (row.damaged) made.push(h("span.flag.bad", row.kind === "leaf" ? "damaged" : "has damage"));
        else if (row.problem) made.push(h("span.flag", "not read"));
        if (row.special) made.push(h("span.flag.warn", { title: `${count(row.special)} NaN or infinite` }, "NaN/Inf"));
        if (row.value !== undefined) made.push(h("span.value.muted", h("bdi", `= ${eformer.visible(row.value)}`)));
        return made;
      },
      dtype: (row) => h("span.mono", { title: eformer.visible(row.dtype) }, row.value !== undefined ? "value" : shortDtype(row.dtype)),
      shape: (row) => row.shape && row.value === undefined ? h("span.mono", eformer.shape(row.shape)) : h("span.muted", row.kind === "group" ? eformer.many(row.leaves, "leaf", "leaves") : ""),
      params: (row) => row.value !== undefined ? "" : eformer.amount(row.params),
      nbytes: (row) => [row.nbytes > 0.08 * summary.nbytes ? h("span.share", { style: { width: `${(100 * row.nbytes) / Math.max(1, summary.nbytes)}%` } }) : null, h("span", row.value !== undefined ? "" : bytes(row.nbytes))],
      spark: (row) => row.bins ? eformer.sparkline(row.bins) : "",
      std: (row) => row.std === undefined || row.std === null ? "" : number(row.std, 3, { isColumn: true }),
      change: (row) => row.change ? h("span", { class: `delta ${eformer.became(row.change) ? "became" : row.change.status}`, style: { "--heat-at": String(eformer.heat(row.change)) } },
        eformer.changeText(row.change)) : "",
    };
    const shortDtype = (dtype) => {
      const [first, ...more] = dtype.split(", ");
      return eformer.visible(first) + (more.length ? ` +${more.length}` : "");
    };
    const marked = (label) => {
      const text = query.trim().toLowerCase();
      const at = text && !/[*?[]/.test(text) ? label.toLowerCase().indexOf(text) : -1;
      if (at < 0) return label;
      return [label.slice(0, at), h("mark", label.slice(at, at + text.length)), label.slice(at + text.length)];
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
      return reload();
    };
    for (const column of columns) if (column.sort) column.cell.setAttribute("aria-sort", "none");

    // ------------------------------------------------------------------------------------ search
    const input = h("input", { type: "search", id: "search", placeholder: "Search names: text, or a pattern like *.bias", "aria-label": "Search leaves by name", autocomplete: "off", spellcheck: "false" });
    let waiting = 0;
    input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => search(input.value), 60); });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { if (input.value) { input.value = ""; search(""); } else input.blur(); event.stopPropagation(); }
      if (event.key === "ArrowDown" || event.key === "Enter") { grid.focus(); activate(Math.max(0, active)); if (event.key === "Enter") choose(); event.preventDefault(); }
    });
    let unfolded = null;  // the tree as it was before the search
    const search = async (text) => {
      clearTimeout(waiting);
      const before = query;
      query = text.trim() ? text : "";
      if (query && !before) unfolded = { root, active, top: scroller.scrollTop };
      grid.classList.toggle("searching", Boolean(query));
      if (!query && unfolded) {
        ({ root, active } = unfolded);
        flatten();
        scroller.scrollTop = unfolded.top;
        unfolded = null;
        say();
        return;
      }
      active = -1;
      scroller.scrollTop = 0;
      await reload();
      if (query && lines.length) active = 0;
      draw();
    };
    const say = () => {
      status.textContent = query ? `${eformer.many(root.total, "leaf", "leaves")} found` : `${eformer.many(summary.leaves, "leaf", "leaves")}`;
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
      const node = lines[active]?.node;
      if (!node) return;
      selected = key(node.row);
      draw();
      onSelect(node.row);
    };
    const keys = {
      ArrowDown: () => activate(active + 1),
      ArrowUp: () => activate(Math.max(0, active - 1)),
      Home: () => activate(0),
      End: () => activate(lines.length - 1),
      PageDown: () => activate(Math.min(lines.length - 1, active + Math.floor(scroller.clientHeight / ROW) - 1)),
      PageUp: () => activate(Math.max(0, active - Math.floor(scroller.clientHeight / ROW) + 1)),
      ArrowRight: async () => {
        const node = lines[active]?.node;
        if (node?.row.kind !== "group") return;
        if (!node.isOpen) await open(node); else activate(active + 1);
      },
      ArrowLeft: () => {
        const line = lines[active];
        if (line?.node?.isOpen) close(line.node);
        else if (line && line.up !== root) activate(lines.findIndex((one) => one.node === line.up));
      },
      Enter: () => {
        choose();
        const node = lines[active]?.node;
        if (node?.row.kind === "group") node.isOpen ? close(node) : open(node);
      },
      " ": () => choose(),
      "*": async () => { const up = lines[active]?.up; for (const kid of up?.kids ?? []) if (kid) await open(kid); },
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
      const node = lines[active]?.node;
      if (!node) return;
      choose();
      if (node.row.kind === "group") node.isOpen ? close(node) : open(node);
      else draw();
    });
    let scrolled = 0;
    scroller.addEventListener("scroll", () => { if (scroller.scrollTop !== scrolled) { scrolled = scroller.scrollTop; draw(); } }, { passive: true });
    new ResizeObserver(() => draw()).observe(scroller);
    addEventListener("beforeprint", () => render(true));
    addEventListener("afterprint", () => render());

    // ------------------------------------------------------------------------------------ reveal
    // Unfold the tree down to a leaf or a group, and make it the active row.
    const reveal = async (path, kind, { select = true } = {}) => {
      if (query) { input.value = ""; await search(""); }
      const steps = await source.locate(path, kind, order);
      let node = root;
      for (const [n, at] of steps.entries()) {
        await fetchPage(node, Math.floor(at / PAGE));
        const kid = node.kids[at];
        if (!kid) return;
        if (n < steps.length - 1) await open(kid);
        node = kid;
      }
      flatten();
      const at = lines.findIndex((line) => line.node === node);
      if (select && node.row) selected = key(node.row);
      activate(at);
      scroller.scrollTop = Math.max(0, (at - Math.floor(scroller.clientHeight / ROW / 2)) * ROW);
    };

    // A leaf was read: its row, and the rows above it, say how it changed.
    const note = (leaf) => {
      if (!leaf?.change) return;
      const told = (node) => {
        if (node.row.change?.status !== "unknown") return;
        node.row.change = leaf.change;
        for (let up = node.up; up?.row && eformer.became(leaf.change); up = up.up)
          up.row.change = { ...up.row.change, became_nan: (up.row.change.became_nan ?? 0) + (leaf.change.became_nan ?? 0), became_inf: (up.row.change.became_inf ?? 0) + (leaf.change.became_inf ?? 0) };
      };
      const find = (node) => node.kids.forEach((kid) => {
        if (kid.row.kind === "group") find(kid); else if (kid.row.path === leaf.path) told(kid);
      });
      for (const top of [root, unfolded?.root]) if (top) find(top);
      draw();
    };

    const start = async () => {
      root.isOpen = true;
      await fetchPage(root, 0);
      for (let node = root, depth = 0; node.total === 1 && depth < 4; depth++) {
        node = node.kids[0];
        if (node?.row.kind !== "group") break;
        await open(node);
      }
      // A few groups are shown open, as long as all of it fits.
      for (const kid of [...root.kids]) if (kid?.row.kind === "group" && lines.length < 10) await open(kid);
      say();
    };
    return { grid, input, status, start, reveal, search, note, sortBy: (id) => sortBy(columns.find((one) => one.id === id)) };
  };
})();
