// A source whose data are in the page itself, in columns: see base.js for what it answers, facts.py for the columns.
"use strict";
(() => {
  eformer.embeddedData = () => JSON.parse(document.getElementById("data").textContent);

  eformer.embeddedSource = (data) => data.kind === "run" ? runSource(data) : checkpointSource(data);

  const runSource = (data) => ({
    kind: "run",
    async run() { return data.run; },
  });

  const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const value = Object.fromEntries([...digits].map((digit, n) => [digit, n]));
  const unpacked = (text) => {
    const [most, heights] = text.split(" ");
    const counts = [];
    for (let n = 0; n < heights.length; n += 2) {
      const height = 64 * value[heights[n]] + value[heights[n + 1]];
      counts.push(height === 4095 ? Number(most) : Math.max(height ? 1 : 0, Math.round(height * Number(most) / 4095)));
    }
    return counts;
  };
  const flags = (lengths) => lengths.flatMap((length, n) => Array(length).fill(n % 2 === 1));

  const checkpointSource = (data) => {
    const { leaves } = data;
    const stats = leaves.statistics;
    const change = leaves.changes;
    const statuses = { s: "same", c: "changed", a: "added", u: "unknown" };
    const nodes = [];
    const byPath = new Map();
    const byLeaf = new Map();
    const checked = flags(leaves.checked);
    const isLeaf = flags(leaves.is_leaf);

    let changed = 0;  // leaves are asked for in their order
    const changeOf = (n) => {
      if (!change) return null;
      const found = { status: statuses[change.status[n]] };
      for (const name of ["what", "unlike", "from_zero", "became_nan", "became_inf"]) if (n in change[name]) found[name] = change[name][n];
      if (found.status === "changed") {
        for (const name of ["relative", "largest", "share"]) found[name] = change[name][changed];
        changed++;
      }
      return withoutZeros(found);
    };

    let number = 0;
    for (let n = 0; n < leaves.up.length; n++) {
      const part = leaves.parts[leaves.part[n]];
      const parent = leaves.up[n] < 0 ? null : nodes[leaves.up[n]];
      const path = parent && parent.rawPath ? `${parent.rawPath}.${part}` : part;
      const node = { name: part, rawPath: path, path, parent, kids: [], leaf: -1, leaves: 0, params: 0, nbytes: 0,
        damaged: false, special: 0, dtypes: new Map() };
      parent?.kids.push(node);
      nodes.push(node);
      if (!isLeaf[n]) { byPath.set(path, node); continue; }
      node.leaf = number;
      node.path = eformer.leafPath(path);
      byLeaf.set(node.path, node);
      const [dtype, , nbytes, params] = leaves.kinds[leaves.kind[number]];
      node.leaves = 1;
      node.nbytes = nbytes;
      node.params = params;
      node.dtypes.set(dtype, nbytes);
      node.damaged = leaves.problems[number]?.[1] === 1;
      node.special = stats ? (stats.nan[number] ?? 0) + (stats.posinf[number] ?? 0) + (stats.neginf[number] ?? 0) : 0;
      node.change = changeOf(number);
      number++;
    }
    for (let n = nodes.length - 1; n > 0; n--) {
      const node = nodes[n], up = node.parent;
      up.leaves += node.leaves;
      up.nbytes += node.nbytes;
      up.params += node.params;
      up.special += node.special;
      up.damaged ||= node.damaged;
      for (const [dtype, nbytes] of node.dtypes) up.dtypes.set(dtype, (up.dtypes.get(dtype) ?? 0) + nbytes);
      if (node.change) up.change = sum(up.change, node.change);
    }
    const mainDtype = (node) => {
      let best = "", most = -1;
      for (const [dtype, nbytes] of node.dtypes) if (nbytes > most) [best, most] = [dtype, nbytes];
      return best;
    };

    const row = (node, name) => {
      const found = { path: node.path, name: name ?? node.name, kind: node.leaf < 0 ? "group" : "leaf", leaves: node.leaves,
        params: node.params, nbytes: node.nbytes, damaged: node.damaged, special: node.special, change: node.change ?? null,
        dtype: node.leaf < 0 ? [...node.dtypes.keys()].filter(Boolean).join(", ") : mainDtype(node) };
      if (node.leaf < 0) {
        if (eformer.isFolded(node.name)) found.count = node.kids.length;
        return found;
      }
      const n = node.leaf;
      found.shape = leaves.kinds[leaves.kind[n]][1];
      if (n in leaves.values) found.value = leaves.values[n];
      if (stats && stats.min[n] !== null) {
        found.std = stats.std[n];
        found.mean = stats.mean[n];
        found.bins = unpacked(stats.bins[n]);
      }
      if (leaves.problems[n]) found.problem = leaves.problems[n][0];
      return found;
    };

    const keys = {
      name: (node) => eformer.label(node.path),
      params: (node) => node.params,
      nbytes: (node) => node.nbytes,
      dtype: (node) => mainDtype(node),
      std: (node) => (node.leaf >= 0 && stats && stats.std[node.leaf]) || 0,
      change: (node) => weight(node.change),
    };
    const sorted = (list, { sort = "", descending = false }) => {
      if (!(sort in keys)) return list;
      const key = new Map(list.map((node) => [node, keys[sort](node)]));
      const collator = new Intl.Collator("en", { numeric: true });
      const compare = (a, b) => typeof a === "string" ? collator.compare(a, b) : Array.isArray(a) ? heavier(a, b) : a - b;
      const sign = descending ? -1 : 1;
      return [...list].sort((a, b) => sign * compare(key.get(a), key.get(b)));
    };
    const paged = (list, { offset = 0, limit = 200 }, make) =>
      ({ total: list.length, rows: list.slice(offset, offset + limit).map(make) });

    let lastQuery = null, lastFound = null;
    const matching = (query) => {
      if (query === lastQuery) return lastFound;
      const matches = matcher(query);
      const found = nodes.filter((node) => node.leaf >= 0 && matches(node));
      [lastQuery, lastFound] = [query, found];
      return found;
    };

    const items = (node, most) => {
      const kids = node.kids.filter((kid) => kid.nbytes > 0).sort((a, b) => b.nbytes - a.nbytes);
      const rest = kids.slice(most);
      return { list: kids.slice(0, most),
        rest: { count: rest.length, nbytes: rest.reduce((total, kid) => total + kid.nbytes, 0),
          change: rest.reduce((all, kid) => kid.change ? sum(all, kid.change) : all, null) } };
    };
    const brief = (node) => ({ count: eformer.isFolded(node.name) ? node.kids.length : undefined, path: node.path, name: node.name, kind: node.leaf < 0 ? "group" : "leaf", nbytes: node.nbytes,
      leaves: node.leaves, dtype: mainDtype(node), change: node.change ?? null });

    return {
      kind: "checkpoint",
      async summary() { return { kind: "checkpoint", ...data.summary }; },
      async children(path, options = {}) {
        const node = byPath.get(path);
        return node ? paged(sorted(node.kids, options), options, (kid) => row(kid)) : { total: 0, rows: [] };
      },
      async search(query, options = {}) {
        return paged(sorted(matching(query), options), options, (node) => row(node, node.path));
      },
      async leaf(path) {
        const node = byLeaf.get(path);
        if (!node) return null;
        const n = node.leaf;
        const [dtype, shape, nbytes, params, sharding, boxes] = leaves.kinds[leaves.kind[n]];
        const [problem, damaged] = leaves.problems[n] ?? [null, 0];
        const found = { path, dtype, shape, nbytes, params, boxes, value: leaves.values[n] ?? null, problem, damaged: damaged === 1,
          checked: checked[n], sharding: sharding === null ? null : leaves.shardings[sharding],
          change: node.change ?? null, statistics: null };
        const isMeasured = stats && !(n in leaves.values) && (stats.bins[n] || stats.nan[n] || stats.posinf[n] || stats.neginf[n] || params === 0);
        if (isMeasured && !problem) {
          const [low, high, log, below, above] = stats.axes[n] ?? [stats.min[n], stats.max[n], 0, 0, 0];
          found.statistics = { size: params, min: stats.min[n], max: stats.max[n], mean: stats.mean[n], std: stats.std[n],
            zeros: stats.zeros[n] ?? 0, nan: stats.nan[n] ?? 0, posinf: stats.posinf[n] ?? 0, neginf: stats.neginf[n] ?? 0,
            magnitudes: stats.magnitudes.includes(n),
            histogram: stats.bins[n] ? { low, high, scale: log ? "log" : "linear", counts: unpacked(stats.bins[n]), below, above } : null };
        }
        return found;
      },
      async treemap(path) {
        const node = byPath.get(path) ?? nodes[0];
        const above = [];
        for (let up = node; up; up = up.parent) above.unshift({ path: up.path, name: up.name });
        const { list, rest } = items(node, 240);
        // The bytes of a tile are those of its children and of its rest.
        const nested = (kid, depth) => {
          const inner = items(kid, depth < 3 ? 24 : 0);
          return { ...brief(kid), children: inner.list.map((one) => nested(one, depth + 1)), rest: inner.rest };
        };
        return { path: node.path, above, rest, nbytes: node.nbytes, items: list.map((kid) => nested(kid, 0)) };
      },
      // Where a row is: its place among the children of each group above it.
      async locate(path, kind, options = {}) {
        const steps = [];
        for (let node = (kind === "leaf" ? byLeaf : byPath).get(path); node?.parent; node = node.parent)
          steps.unshift(sorted(node.parent.kids, options).indexOf(node));
        return steps;
      },
      async changes() { return data.against ?? null; },
    };
  };

  // The change of a group, as `combined` of changes.py has it: the status of its leaves, and the strongest of them.
  const sum = (before, change) => {
    const status = !before || before.status === change.status ? change.status
      : [before.status, change.status].includes("unknown") ? "unknown" : "changed";
    const larger = !before || heavier(weight(change), weight(before)) > 0 ? change : before;
    const found = status === "unknown" ? { status } : { status, relative: larger.relative, from_zero: larger.from_zero };
    for (const name of ["became_nan", "became_inf"]) found[name] = (before?.[name] ?? 0) + (change[name] ?? 0);
    return withoutZeros(found);
  };
  // As `as_json` of changes.py: a relative change of 0 says that a leaf changed in its bits or its dtype alone.
  const withoutZeros = (change) => Object.fromEntries(Object.entries(change).filter(([name, value]) => value
    || (name === "relative" && value === 0 && change.status === "changed")));
  // Order changes as `weight` of changes.py does: a rank, and an amount within it.
  const ranks = { same: 0, unknown: 1, changed: 2, added: 3 };
  const weight = (change) => {
    if (!change) return [-1, 0];
    if (eformer.became(change)) return [6, eformer.became(change)];
    if (change.from_zero) return [5, 0];
    if (change.status === "changed" && (change.relative ?? null) === null) return [4, 0];
    return [ranks[change.status], change.relative ?? 0];
  };
  const heavier = (a, b) => a[0] - b[0] || a[1] - b[1];

  // Match names that contain the query, or match it if it is a glob; letters count alike in both cases.
  const matcher = (query) => {
    const text = query.trim().toLowerCase();
    const isGlob = /[*?[]/.test(text);
    const pattern = isGlob ? globPattern(text) : null;
    return (node) => {
      node.folded ??= eformer.label(node.path).toLowerCase();
      return pattern ? pattern.test(node.folded) || pattern.test(node.path.toLowerCase())
        : node.folded.includes(text) || node.path.toLowerCase().includes(text);
    };
  };
  const globPattern = (glob) => {
    let made = "";
    for (let n = 0; n < glob.length; n++) {
      const c = glob[n];
      if (c === "*") made += ".*";
      else if (c === "?") made += ".";
      else if (c === "[" && glob.indexOf("]", n + 2) > 0) {
        const end = glob.indexOf("]", n + 2);
        const inside = glob.slice(n + 1, end).replace(/[\\\]^]/g, "\\$&").replace(/^!/, "^");
        made += `[${inside}]`;
        n = end;
      } else made += c.replace(/[.+^${}()|[\]\\]/g, "\\$&");
    }
    try { return new RegExp(`^${made}$`, "su"); } catch { return new RegExp("(?!)"); }
  };
})();
