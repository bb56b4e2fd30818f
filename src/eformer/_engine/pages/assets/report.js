// The page of a checkpoint.
"use strict";
(() => {
  const { h, bytes, count, many, number, percent } = eformer;

  eformer.start = async (coming) => {
    try {
      const source = eformer.source = await coming;
      await (source.kind === "run" ? eformer.drawRun(source) : drawCheckpoint(source));
    } catch (error) { eformer.fail(error); }
  };

  const drawCheckpoint = async (source) => {
    const { summary, changes } = source;
    const app = document.getElementById("app");
    const panel = h("aside.panel", { id: "leaf", tabindex: "-1", "aria-label": "Selected leaf", "aria-live": "polite" });
    let waiting = 0;
    const showLeaf = async (path) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => panel.replaceChildren(h("p.muted.empty", "Reading…")), 300);
      const leaf = await source.leaf(path);
      clearTimeout(waiting);
      panel.replaceChildren(...leafPanel(leaf, summary));
      tree.draw();
      tree.showFilters();
      const isNews = source.compare && eformer.became(leaf?.change) && !source.changes.became.some((one) => one.path === path);
      if (isNews) { await source.compare(); drawChanges(); }
    };
    const showGroup = (row) => { panel.replaceChildren(...groupPanel(row, summary)); };
    const tree = eformer.tree(source, summary, { onSelect: (row) => row.kind === "leaf" ? showLeaf(row.path) : showGroup(row) });
    const goTo = async (path) => {
      tree.reveal(path, "leaf");
      await showLeaf(path);
      section.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    };
    const map = eformer.treemap(source, summary, { onLeaf: goTo, onGroup: (path) => tree.reveal(path, "group", { select: false }) });

    const section = h("section.browse", { "aria-labelledby": "leaves-title" },
      h("div.bar", h("h2", { id: "leaves-title" }, "Leaves"), tree.status, tree.filters, h("label.search", tree.input, h("kbd", { "aria-hidden": "true" }, "/"))),
      h("div.split", h("div.tree", tree.where, tree.grid), panel));
    const showOnly = (name) => { tree.showOnly(name); section.scrollIntoView({ block: "start" }); };
    let changed = null;
    const drawChanges = () => {
      const drawn = changesSection(source.changes, summary, goTo, showOnly);
      changed?.replaceWith(drawn);
      return changed = drawn;
    };
    app.replaceChildren(
      header(summary),
      h("div.page",
        title(summary),
        tiles(summary, changes, showOnly),
        notes(summary),
        changes ? drawChanges() : null,
        h("section.map", { "aria-labelledby": "map-title" },
          h("div.bar", h("h2", { id: "map-title" }, "Bytes"), map.crumbs, h("label.choice", "colour ", map.choice)), map.map),
        section,
        origin(summary),
        metadata(summary),
        footer(summary)));
    app.removeAttribute("aria-busy");
    panel.replaceChildren(h("p.muted.empty", "Select a leaf to see its values and its sharding."));
    map.zoom("");
    tree.start();
    await first(source, summary, changes, tree, showLeaf);
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !event.target.closest("input, select, textarea")) { tree.input.focus(); tree.input.select(); event.preventDefault(); }
    });
    document.documentElement.dataset.ready = "true";
  };

  // Begin with the first of these leaves: damaged, became NaN, changed most, largest.
  const first = async (source, summary, changes, tree, showLeaf) => {
    if (summary.has_values === "on demand") return;  // the largest leaf may take long to read
    const [largest] = source.search("", { sort: "nbytes", descending: true });
    const path = summary.verification.damaged?.[0] ?? changes?.became[0]?.path ?? changes?.largest[0]?.path ?? largest?.path;
    if (path === undefined) return;
    tree.reveal(path, "leaf");
    await showLeaf(path);
  };

  const header = (summary) => h("header.top", h("div.brand", h("b", "eformer"), h("span.muted", summary.kind === "run" ? "run" : summary.against ? "comparison" : "report"), summary.badge,
    summary.run ? h("a", { href: summary.run.href }, "← ", eformer.name(summary.run.title)) : null), eformer.themeButton());
  eformer.header = header;

  const states = {
    verified: ["good", "✓", "verified"], read: ["neutral", "○", "readable, no digests"], unchecked: ["neutral", "○", "not checked"],
    damaged: ["bad", "✗", "damaged"], partly: ["warn", "!", "partly read"],
  };
  const title = (summary) => {
    const { state, text } = summary.verification;
    const [shade, sign, words] = states[state] ?? ["neutral", "", state];
    const facts = [summary.format, summary.writer, summary.saved_at && eformer.time(summary.saved_at), summary.signed_by && `signed by ${summary.signed_by} (not checked here)`];
    return h("div.title",
      h("div", h("h1", eformer.name(summary.title), summary.against ? [h("span.vs", " against "), eformer.name(summary.against.title, { class: "name vs-name" })] : null),
        h("p.muted.facts", h("bdi.mono", eformer.visible(summary.path)), facts.filter(Boolean).map((fact) => [h("span.dot", { "aria-hidden": "true" }, "·"), h("bdi", eformer.visible(fact))])), choice(summary.run)),
      eformer.state(shade, sign, words, text, { title: text }));
  };

  // Links to the other steps of the run, to compare this step with.
  const choice = (run) => run?.steps.length ? h("p", h("label.choice", "compare with ", h("select", { id: "against",
    onchange: (event) => { location.search = event.target.value && `?against=${event.target.value}`; } },
  [h("option", { value: "" }, "nothing"), ...run.steps.map((step) => h("option", { value: step, selected: step === run.against }, `step ${step}`))]))) : null;

  const tiles = (summary, changes, showOnly) => {
    const { health } = summary;
    const troubles = [health.nan ? `NaN in ${count(health.nan)}` : null, health.inf ? `Inf in ${count(health.inf)}` : null].filter(Boolean);
    const link = (text, name) => h("button.link", { type: "button", onclick: () => showOnly(name) }, text);
    const tile = eformer.stat;
    return h("dl.tiles",
      tile("Parameters", eformer.amount(summary.params), count(summary.params)),
      tile("Size", bytes(summary.nbytes), many(summary.files, "file")),
      tile("Arrays", count(summary.leaves - summary.values), summary.values ? `and ${many(summary.values, "plain value")}` : "no plain values"),
      summary.has_values === "on demand" ? tile("Values", "on demand", "select a leaf to read it")
        : summary.has_values ? tile("Values", troubles.length ? link(troubles[0], "special") : "finite", troubles.length ? [...troubles.slice(1), `of ${many(summary.leaves - summary.values, "array")}`].join(", ") : health.zero ? link(`${many(health.zero, "array")} all zero`, "zero") : "no NaN, no Inf", changes?.became.length ? "bad" : troubles.length ? "warn" : "")
        : tile("Values", "not read", "headers only"),
      h("div.stat.wide", h("dt", "dtypes"), h("dd", eformer.dtypeBars(summary.dtypes, Math.max(1, summary.nbytes)))));
  };

  const notes = (summary) => summary.notes.length || summary.left_out.length || summary.verification.damaged
    ? h("ul.notes", { "aria-label": "Notes" }, summary.notes.map((note) => h("li", h("bdi", eformer.visible(note)))),
      (summary.verification.damaged ?? []).slice(0, 10).map((path) => h("li.bad", "damaged: ", eformer.name(eformer.label(path))))) : null;

  // ----------------------------------------------------------------------------------------- changes
  const MOST_LOUD = 20;
  const changesSection = (changes, summary, goTo, showOnly) => {
    const { counts } = changes;
    const chip = (name, text) => !counts[name] ? null : ["became", "changed"].includes(name)
      ? h(`button.chip.${name}`, { type: "button", onclick: () => showOnly(name) }, h("b", count(counts[name])), ` ${text ?? name}`) : h(`span.chip.${name}`, h("b", count(counts[name])), ` ${text ?? name}`);
    const body = h("div.maps");
    const maps = changes.heatmaps;
    const drawMap = (n) => {
      eformer.heatDomain(maps[n]);
      body.replaceChildren(eformer.heatmap(maps[n], goTo), eformer.heatLegend(maps[n]));
      requestAnimationFrame(() => {  // scroll to the first layer that became NaN
        const loud = body.querySelector("td.became");
        if (loud) body.scrollLeft = loud.offsetLeft - body.clientWidth / 2;
      });
    };
    const choice = maps.length > 1 ? h("label.choice", "layers of ", h("select", { id: "stack", onchange: (event) => drawMap(Number(event.target.value)) },
      maps.map((one, n) => h("option", { value: n }, eformer.visible(one.stack ? eformer.label(one.stack) : "all other leaves"))))) : null;
    if (maps.length) drawMap(0);
    const largest = (list, name) => h("ol.largest", { "aria-label": name }, list.map((one) => h("li", h("button.link", { type: "button", onclick: () => goTo(one.path) },
      eformer.name(eformer.label(one.path))), h("span", { class: `delta ${eformer.became(one) ? "became" : one.status}`, style: { "--heat-at": String(eformer.heat(one)) } }, eformer.changeText(one)),
      one.what ? h("span.what.small.muted", eformer.visible(one.what)) : null)));
    const listed = (list, name, total) => list.length ? h("details.small", h("summary", `${name}: ${count(total)}`), h("ul.names", list.slice(0, 500).map((one) =>
      h("li", eformer.name(eformer.label(one.path)), " ", h("span.muted.mono", eformer.visible(one.what))))), total > list.length ? h("p.muted", `and ${count(total - list.length)} more`) : null) : null;
    return h("section.changes", { "aria-labelledby": "changes-title" },
      h("div.bar", h("h2", { id: "changes-title" }, "Change"), h("div.chips", chip("became", "became NaN or Inf"), chip("changed"), chip("added"), chip("removed"), chip("same", "the same"), chip("unknown", "not read")), choice),
      changes.became.length ? h("div.alarm", { id: "became", role: "alert" },
        h("b", `${many(counts.became, "leaf", "leaves")} became NaN or Inf`), largest(changes.became.slice(0, MOST_LOUD), "Leaves that became NaN or Inf"),
        counts.became > MOST_LOUD ? h("button.link.small", { type: "button", onclick: () => showOnly("became") }, `and ${count(counts.became - MOST_LOUD)} more`) : null) : null,
      h("div.change-split",
        h("div.heat", maps.length ? body : h("p.muted.empty", "No arrays to compare.")),
        h("div", h("h3", "Largest relative change"), changes.largest.length ? largest(changes.largest, "Largest relative change") : h("p.muted", !counts.unknown ? `No array ${changes.state.length ? "of the model " : ""}changed.` : summary.has_values ? "Select a leaf to compare its values." : "Values were not compared."),
          changes.state?.length ? h("details.small", h("summary", "Optimizer state"), largest(changes.state, "Largest relative change of the optimizer state")) : null,
          listed(changes.added, "added", counts.added ?? 0), listed(changes.removed, "removed", counts.removed ?? 0))));
  };

  // ------------------------------------------------------------------------------------------- panel
  const facts = (pairs) => h("dl.facts", pairs.filter(Boolean).map(([name, value, shade]) => [h("dt", name), h("dd", { class: shade ?? "" }, value)]));

  const leafPanel = (leaf, summary) => {
    if (!leaf) return [h("p.muted.empty", "No such leaf.")];
    const { statistics, change } = leaf;
    const parts = [h("h3.leaf-name", eformer.name(eformer.label(leaf.path)))];
    if (leaf.value !== null) {
      parts.push(h("p.mono.plain", h("bdi", eformer.visible(leaf.value))), h("p.muted.small", "A plain value."));
      if (change) parts.push(...changePart(change));
      return parts;
    }
    parts.push(h("p.kind", h("b.mono", eformer.visible(leaf.dtype)), h("span.mono", leaf.shape.length ? `[${leaf.shape.join(", ")}]` : "[]"),
      h("span.muted", `${bytes(leaf.nbytes)} · ${many(leaf.params, "element")}`)));
    if (leaf.problem) parts.push(h("p.problem", { class: leaf.damaged ? "problem bad" : "problem" }, h("b", leaf.damaged ? "Damaged. " : ""), h("bdi", eformer.visible(leaf.problem))));
    if (statistics) parts.push(...statisticsPart(leaf, statistics));
    else if (!leaf.problem) parts.push(h("p.muted.small", summary.has_values ? "Its elements are not numbers: no statistics." : "Values were not read."));
    if (change) parts.push(...changePart(change));
    if (leaf.sharding) parts.push(h("h4", "Sharding"), eformer.sharding(leaf));
    parts.push(h("h4", "Stored"), facts([
      ["boxes", many(leaf.boxes, "box", "boxes")],
      ["checked", leaf.checked ? "every byte matches its digest" : leaf.damaged ? "does not match" : statistics ? "read; there is no digest" : "no", leaf.checked ? "good" : leaf.damaged ? "bad" : ""]]));
    return parts;
  };

  const statisticsPart = (leaf, found) => {
    const part = (n) => n ? `${count(n)} (${percent(n / Math.max(1, found.size))})` : "0";
    return [
      h("h4", found.magnitudes ? "Absolute values" : "Values"),
      found.histogram ? eformer.histogram(found) : h("p.muted.small", found.size ? "No finite elements." : "No elements."),
      h("dl.facts.two", [["min", number(found.min, 5)], ["max", number(found.max, 5)], ["mean", number(found.mean, 4)], ["std", number(found.std, 4)],
        ["zero", part(found.zeros), found.size && found.zeros === found.size ? "warn" : ""], ["NaN", part(found.nan), found.nan ? "warn" : ""],
        ["+Inf", part(found.posinf), found.posinf ? "warn" : ""], ["−Inf", part(found.neginf), found.neginf ? "warn" : ""]]
        .map(([name, value, shade]) => h("div", h("dt", name), h("dd", { class: shade ?? "" }, value))))];
  };

  const changePart = (change) => [h("h4", "Change"), facts([
    ["status", { same: "the same", changed: "changed", added: "added", unknown: "not read" }[change.status]],
    change.became_nan ? ["became NaN", many(change.became_nan, "element"), "bad"] : null,
    change.became_inf ? ["became Inf", many(change.became_inf, "element"), "bad"] : null,
    change.what ? ["was → is", eformer.visible(change.what)] : null,
    change.relative ? ["‖a−b‖ / ‖b‖", percent(change.relative)] : change.from_zero ? ["‖a−b‖ / ‖b‖", "it was zero before"] : null,
    change.largest ? ["largest", number(change.largest)] : null,
    change.share ? ["elements", `${percent(change.share)} differ`] : null,
    change.unlike ? ["NaN or Inf", `${count(change.unlike)} on one side only`, "warn"] : null])];

  const groupPanel = (row, summary) => [h("h3.leaf-name", eformer.name(eformer.label(row.path))),
    facts([row.count ? ["alike", many(row.count, "layer")] : null, ["leaves", count(row.leaves)], ["parameters", count(row.params)],
      ["size", `${bytes(row.nbytes)}, ${percent(row.nbytes / Math.max(1, summary.nbytes))} of all`], ["dtypes", h("span.mono", eformer.visible(row.dtypes.filter(Boolean).join(", ")))],
      row.special ? ["NaN or Inf", count(row.special), "warn"] : null, row.damaged ? ["damage", "has damaged leaves", "bad"] : null,
      row.change ? ["largest change", eformer.changeText(row.change)] : null])];

  const origin = (summary) => summary.origin?.length ? h("section.meta", { "aria-labelledby": "origin-title" }, h("h2", { id: "origin-title" }, "Origin"),
    h("dl.facts", summary.origin.map(([label, text]) => [h("dt", h("bdi", eformer.visible(label))), h("dd.mono", h("bdi", eformer.visible(text)))]))) : null;

  const metadata = (summary) => Object.keys(summary.metadata).length ? h("section.meta", { "aria-labelledby": "meta-title" }, h("h2", { id: "meta-title" }, "Metadata"),
    h("dl.facts", Object.entries(summary.metadata).map(([name, value]) => [h("dt", h("bdi", eformer.visible(name))), h("dd.mono", h("bdi", eformer.visible(value)))]))) : null;

  const footer = (summary) => h("footer.muted.small", `Made by ${summary.made_by}, ${eformer.time(summary.made_at)}. Keys: / searches, arrows walk the tree, Enter opens, Escape goes back.`);
})();
