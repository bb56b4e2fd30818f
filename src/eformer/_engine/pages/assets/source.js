// The leaves of a checkpoint as a tree, from the columns that facts.py writes: added up, sorted and searched here.
// See base.js for what a source has.
"use strict";
(() => {
  eformer.embeddedData = () => JSON.parse(document.getElementById("data").textContent);

  eformer.embeddedSource = (data) => data.kind === "run" ? { kind: "run", run: async () => data.run } : eformer.checkpointSource(data);

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
  const specials = (found, n) => (found.nan[n] ?? 0) + (found.posinf[n] ?? 0) + (found.neginf[n] ?? 0);

  // `read` asks for a leaf that has to be read first; a page that is a file has what there is to know in its data.
  eformer.checkpointSource = ({ summary, leaves, against }, read = null) => {
    const { statistics } = leaves;
    const isChecked = flags(leaves.checked), isMeasured = flags(statistics?.of ?? []);
    const changeOf = changes(leaves.changes);
    const groups = new Map(), byPath = new Map(), nodes = [];

    let leaf = 0, measured = 0;  // so many were made
    const asLeaf = (node) => {
      const n = node.leaf = leaf++;
      const [dtype, shape, nbytes, params] = leaves.kinds[leaves.kind[n]];
      const [problem, damaged] = leaves.problems[n] ?? [null, 0];
      node.at = isMeasured[n] ? measured++ : -1;
      Object.assign(node, { kind: "leaf", path: eformer.leafPath(node.path), dtype, shape, nbytes, params, problem, damaged: damaged === 1,
        leaves: 1, value: leaves.values[n], special: node.at < 0 ? 0 : specials(statistics, node.at), change: changeOf(n) });
      byPath.set(node.path, node);
    };
    const above = [];  // the last row of every depth
    leaves.depth.forEach((depth, n) => {
      const part = leaves.parts[leaves.part[n]], parent = depth ? above[depth - 1] : null;
      const node = { kind: "group", path: parent?.path ? `${parent.path}.${part}` : part, name: part, parent, kids: [] };
      parent?.kids.push(node);
      nodes.push(above[depth] = node);
      if (depth && !(leaves.depth[n + 1] > depth)) asLeaf(node);  // every group but the root has rows
      else groups.set(node.path, node);
    });
    // Add up what is below a group.
    const total = (group) => {
      Object.assign(group, { leaves: 0, params: 0, nbytes: 0, special: 0, damaged: false, change: null });
      const dtypes = new Map();
      const add = (nbytes, dtype) => dtypes.set(dtype, (dtypes.get(dtype) ?? 0) + nbytes);
      for (const kid of group.kids) {
        for (const name of ["leaves", "params", "nbytes", "special"]) group[name] += kid[name];
        group.damaged ||= kid.damaged;
        if (kid.change) group.change = sum(group.change, kid.change);
        if (kid.dtypes) kid.dtypes.forEach(add); else add(kid.nbytes, kid.dtype);
      }
      group.dtypes = dtypes;
      group.dtype = [...dtypes].reduce((most, one) => one[1] > most[1] ? one : most, ["", -1])[0];
      if (eformer.isFolded(group.name)) group.count = group.kids.length;
    };
    for (let n = nodes.length - 1; n >= 0; n--) if (nodes[n].kind === "group") total(nodes[n]);

    const statisticsOf = (node) => {
      if (node.statistics === undefined) node.statistics = node.at >= 0 ? fromColumns(node, node.at) : null;
      return node.statistics;
    };
    const fromColumns = ({ params }, n) => {
      const { min, max, mean, std, bins, axes, magnitudes } = statistics;
      const [low, high, log, below, above] = axes[n] ?? [min[n], max[n], 0, 0, 0];
      const found = { size: params, min: min[n], max: max[n], mean: mean[n], std: std[n], magnitudes: magnitudes.includes(n),
        histogram: bins[n] ? { low, high, scale: log ? "log" : "linear", counts: unpacked(bins[n]), below, above } : null };
      for (const name of ["zeros", "nan", "posinf", "neginf"]) found[name] = statistics[name][n] ?? 0;
      return found;
    };

    const keys = {
      name: labelOf,
      params: (node) => node.params,
      nbytes: (node) => node.nbytes,
      dtype: (node) => node.dtype,
      std: (node) => node.kind === "leaf" && statisticsOf(node)?.std || 0,
      change: (node) => weight(node.change),
    };
    const sorted = (list, { sort = "", descending = false } = {}) => {
      if (!(sort in keys)) return list;
      const key = new Map(list.map((node) => [node, keys[sort](node)])), sign = descending ? -1 : 1;
      return [...list].sort((a, b) => sign * compare(key.get(a), key.get(b)));
    };

    return {
      kind: "checkpoint", summary, changes: against ?? null, root: nodes[0], statistics: statisticsOf,
      find: (path, kind) => (kind === "leaf" ? byPath : groups).get(path),
      children: (node, order) => sorted(node.kids, order),
      search: (query, order) => sorted([...byPath.values()].filter(matcher(query)), order),
      // The largest rows below a group, and one for all others together, so that bytes add up.
      largest(node, most) {
        node.bySize ??= node.kids.filter((kid) => kid.nbytes > 0).sort((a, b) => b.nbytes - a.nbytes);
        const shown = node.bySize.slice(0, most), rest = node.bySize.slice(most);
        if (rest.length) shown.push({ kind: "rest", path: node.path, name: `${eformer.count(rest.length)} more`, dtype: "", kids: [],
          nbytes: rest.reduce((all, kid) => all + kid.nbytes, 0), change: rest.reduce((all, kid) => kid.change ? sum(all, kid.change) : all, null) });
        return shown;
      },
      async leaf(path) {
        const node = byPath.get(path);
        if (!node) return null;
        if (read) {  // and the rows above it say from now on what was found
          const found = await read(path);
          const { statistics, problem, damaged, change } = found;
          Object.assign(node, { statistics, problem, damaged, change, special: statistics ? statistics.nan + statistics.posinf + statistics.neginf : 0 });
          for (let up = node.parent; up; up = up.parent) total(up);
          return found;
        }
        const { dtype, shape, nbytes, params, problem, damaged, change, leaf: n } = node;
        const [, , , , sharding, boxes] = leaves.kinds[leaves.kind[n]];
        return { path, dtype, shape, nbytes, params, boxes, value: node.value ?? null, problem, damaged, checked: isChecked[n], change,
          sharding: sharding === null ? null : leaves.shardings[sharding], statistics: problem ? null : statisticsOf(node) };
      },
    };
  };

  // Return a function that tells how a leaf changed. It is called for all leaves, in their order.
  const changes = (columns) => {
    const statuses = { s: "same", c: "changed", a: "added", u: "unknown" };
    let changed = 0;
    return (n) => {
      if (!columns) return null;
      const found = { status: statuses[columns.status[n]] };
      for (const name of ["what", "unlike", "from_zero", "became_nan", "became_inf"]) if (n in columns[name]) found[name] = columns[name][n];
      if (found.status !== "changed") return found;
      for (const name of ["relative", "largest", "share"]) found[name] = columns[name][changed];
      changed++;
      return withoutZeros(found);
    };
  };
  // The change of a group: the status of its leaves, "unknown" if they differ in it and any was not read, and the strongest.
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
  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => typeof a === "string" ? collator.compare(a, b) : Array.isArray(a) ? heavier(a, b) : a - b;

  const labelOf = (node) => node.label ??= eformer.label(node.path);
  // Match names that contain the query, or match it if it is a glob; letters count alike in both cases.
  const matcher = (query) => {
    const text = query.trim().toLowerCase();
    const pattern = /[*?[]/.test(text) ? globPattern(text) : null;
    const matches = pattern ? (name) => pattern.test(name) : (name) => name.includes(text);
    return (node) => {
      node.folded ??= labelOf(node).toLowerCase();
      return matches(node.folded) || matches(node.path.toLowerCase());
    };
  };
  const globPattern = (glob) => {
    let made = "";
    for (let n = 0; n < glob.length; n++) {
      const c = glob[n];
      if (c === "*") made += made.endsWith(".*") ? "" : ".*";
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
