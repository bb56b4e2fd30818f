// The leaves of a checkpoint as a tree, from the columns that facts.py writes: added up, sorted and searched here.
// base.js has the interface of a source.
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

  // `read` asks the server for a leaf, and `compare` for all changes as far as leaves were read. A page in a file has neither, because its data are complete.
  //
  // A checkpoint may have hundreds of thousands of leaves, so rows are made on first use. Rows come in the order of a walk:
  // the leaves below a row follow each other, and their bytes are a difference of two running sums.
  eformer.checkpointSource = ({ summary, leaves, against }, { read = null, compare: readChanges = null } = {}) => {
    const { depth, kinds, problems, statistics: columns } = leaves;
    const isLeaf = (n) => n > 0 && !(depth[n + 1] > depth[n]);  // every group but the root has rows
    const firsts = sums(depth.length, isLeaf);  // the number of leaves before a row
    const ends = new Int32Array(depth.length);  // the first row that is not below a row
    for (let n = ends.length - 1; n >= 0; n--) {
      let end = n + 1;
      while (end < ends.length && depth[end] > depth[n]) end = ends[end];
      ends[n] = end;
    }
    const all = leaves.kind.length;
    const nbytes = sums(all, (n) => kinds[leaves.kind[n]][2]), params = sums(all, (n) => kinds[leaves.kind[n]][3]);
    const isChecked = flags(leaves.checked), isMeasured = flags(columns?.of ?? []), places = sums(all, (n) => isMeasured[n]);
    const changed = leaves.changes && changes(leaves.changes);
    const found = new Map();  // the statistics of leaves by their numbers, from the columns or from `read`
    const specialOf = (n) => {
      const at = places[n], one = found.get(n);
      if (one) return one.nan + one.posinf + one.neginf;
      return isMeasured[n] ? (columns.nan[at] ?? 0) + (columns.posinf[at] ?? 0) + (columns.neginf[at] ?? 0) : 0;
    };
    // Which leaves a filter shows, by their numbers.
    const filters = {
      became: (n) => changed && eformer.became(changed[n]) > 0,
      special: (n) => specialOf(n) > 0,
      zero: (n) => {
        const { zeros, size } = found.get(n) ?? (isMeasured[n] ? { zeros: columns.zeros[places[n]], size: kinds[leaves.kind[n]][3] } : {});
        return zeros > 0 && zeros === size;
      },
      changed: (n) => changed && ["changed", "added"].includes(changed[n].status),
      damaged: (n) => problems[n]?.[1] === 1,
    };
    let special, damaged;
    const addUp = () => {
      special = sums(all, specialOf);
      damaged = sums(all, filters.damaged);
    };
    addUp();

    class Row {
      constructor(n, parent) {
        this.n = n;
        this.parent = parent;
        this.kind = isLeaf(n) ? "leaf" : "group";
        this.name = leaves.parts[leaves.part[n]];
        this.path = parent?.path ? `${parent.path}.${this.name}` : this.name;
        [this.from, this.to] = [firsts[n], firsts[ends[n]]];
        this.below = this.combined = null;
        if (this.kind === "leaf") [this.path, this.shape, this.value] = [eformer.leafPath(this.path), kinds[leaves.kind[this.from]][1], leaves.values[this.from]];
      }
      get kids() {
        if (this.below) return this.below;
        this.below = [];
        for (let n = this.n + 1; n < ends[this.n]; n = ends[n]) this.below.push(new Row(n, this));
        return this.below;
      }
      get count() { return eformer.isFolded(this.name) ? this.kids.length : undefined; }
      get leaves() { return this.to - this.from; }
      get nbytes() { return nbytes[this.to] - nbytes[this.from]; }
      get params() { return params[this.to] - params[this.from]; }
      get special() { return special[this.to] - special[this.from]; }
      get damaged() { return damaged[this.to] > damaged[this.from]; }
      get problem() { return this.kind === "leaf" ? problems[this.from]?.[0] ?? null : null; }
      get dtypes() {  // with their bytes, the most first
        const all = new Map();
        for (let n = this.from; n < this.to; n++) { const [dtype, , size] = kinds[leaves.kind[n]]; all.set(dtype, (all.get(dtype) ?? 0) + size); }
        return [...all].sort((a, b) => b[1] - a[1]).map(([dtype]) => dtype);
      }
      get dtype() { return this.kind === "leaf" ? kinds[leaves.kind[this.from]][0] : this.dtypes[0]; }
      get change() {
        if (!changed) return null;
        return this.kind === "leaf" ? changed[this.from] : this.combined ??= combined(changed.slice(this.from, this.to));
      }
    }
    const root = new Row(0, null);
    const everyLeaf = (row = root) => row.kind === "leaf" ? [row] : row.kids.flatMap(everyLeaf);
    // The path of a leaf begins with the paths of the groups above it, without the parts that only rows have.
    const find = (path, kind, row = root) => {
      if (row.path === path && row.kind === kind) return row;
      const above = kind === "leaf" ? eformer.leafPath(row.path) : row.path;
      if (row.kind === "leaf" || (above && path !== above && !path.startsWith(`${above}.`))) return undefined;
      for (const kid of row.kids) { const found = find(path, kind, kid); if (found) return found; }
      return undefined;
    };

    const statistics = ({ kind, from: n }) => {
      if (kind === "leaf" && isMeasured[n] && !found.has(n)) found.set(n, fromColumns(places[n], kinds[leaves.kind[n]][3]));
      return kind === "leaf" && found.get(n) || null;
    };
    const fromColumns = (n, size) => {
      const { min, max, mean, std, bins, axes, magnitudes } = columns;
      const [low, high, log, below, above] = axes[n] ?? [min[n], max[n], 0, 0, 0];
      const made = { size, min: min[n], max: max[n], mean: mean[n], std: std[n], magnitudes: magnitudes.includes(n),
        histogram: bins[n] ? { low, high, scale: log ? "log" : "linear", counts: unpacked(bins[n]), below, above } : null };
      for (const name of ["zeros", "nan", "posinf", "neginf"]) made[name] = columns[name][n] ?? 0;
      return made;
    };
    // Add the result of a leaf that was read to the rows above it.
    const note = (row, leaf) => {
      const n = row.from;
      found.set(n, leaf.statistics);
      if (leaf.problem) problems[n] = [leaf.problem, Number(leaf.damaged)];
      if (changed) changed[n] = leaf.change;
      addUp();
      for (let up = row; up; up = up.parent) up.combined = null;
    };

    const keys = {
      name: labelOf,
      params: (row) => row.params,
      nbytes: (row) => row.nbytes,
      dtype: (row) => row.dtype,
      std: (row) => statistics(row)?.std ?? 0,
      change: (row) => strength(row.change),
    };
    const sorted = (list, { sort = "", descending = false } = {}) => {
      if (!(sort in keys)) return list;
      const key = new Map(list.map((row) => [row, keys[sort](row)])), sign = descending ? -1 : 1;
      return [...list].sort((a, b) => sign * compare(key.get(a), key.get(b)));
    };

    return {
      kind: "checkpoint", summary, changes: against ?? null, root, find, statistics,
      children: (row, order) => sorted(row.kids, order),
      search: (query, order, filter) => {
        const some = filter ? everyLeaf().filter((row) => filters[filter](row.from)) : everyLeaf();
        return sorted(query ? some.filter(matcher(query)) : some, order);
      },
      // Return a query that finds leaves, made of the parts of one that finds none.
      hint(query, filter) {
        const parts = query.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter(Boolean), [longest] = [...parts].sort((a, b) => b.length - a.length);
        return [`*${query.trim()}*`, parts.join("*"), longest].find((one) => one && one !== query.trim() && this.search(one, {}, filter).length);
      },
      counts: () => Object.fromEntries(Object.entries(filters).map(([name, shows]) => [name, sums(all, shows)[all]])),
      compare: readChanges && (async function again() { return this.changes = await readChanges(); }),
      // The largest rows below a group, and one row for the rest, so that bytes add up.
      largest(row, most) {
        row.bySize ??= row.kids.filter((kid) => kid.nbytes > 0).sort((a, b) => b.nbytes - a.nbytes);
        const rest = row.bySize.slice(most);
        return rest.length === 0 ? row.bySize : [...row.bySize.slice(0, most), { kind: "rest", path: row.path, name: `${eformer.count(rest.length)} more`,
          kids: [], dtype: "", nbytes: rest.reduce((total, one) => total + one.nbytes, 0), change: changed && combined(rest.map((one) => one.change)) }];
      },
      async leaf(path) {
        const row = find(path, "leaf");
        if (!row) return null;
        if (read) {
          const leaf = await read(path);
          note(row, leaf);
          return leaf;
        }
        const { from: n, value = null, problem, damaged, change } = row;
        const [dtype, shape, nbytes, params, sharding, boxes] = kinds[leaves.kind[n]];
        return { path, dtype, shape, nbytes, params, boxes, value, problem, damaged, checked: isChecked[n], change,
          sharding: sharding === null ? null : leaves.shardings[sharding], statistics: problem ? null : statistics(row) };
      },
    };
  };

  // Running sums: the n-th is the sum of all numbers before the n-th.
  const sums = (count, of) => {
    const made = new Float64Array(count + 1);
    for (let n = 0; n < count; n++) made[n + 1] = made[n] + Number(of(n));
    return made;
  };

  // Return how each leaf changed.
  const changes = (columns) => {
    const statuses = { s: "same", c: "changed", a: "added", u: "unknown" };
    let changed = 0;
    return Array.from(columns.status, (letter, n) => {
      const found = { status: statuses[letter] };
      for (const name of ["what", "unlike", "from_zero", "became_nan", "became_inf"]) if (n in columns[name]) found[name] = columns[name][n];
      if (letter !== "c") return found;
      for (const name of ["relative", "largest", "share"]) found[name] = columns[name][changed];
      changed++;
      return withoutZeros(found);
    });
  };
  // The change of a group: the status of its leaves, "unknown" if they differ in it and any was not read, and the strongest.
  const combined = (some) => {
    let status = some[0]?.status ?? "same", strongest = some[0] ?? {}, heaviest = strength(some[0]), became_nan = 0, became_inf = 0;
    for (const change of some) {
      if (change.status !== status) status = [status, change.status].includes("unknown") ? "unknown" : "changed";
      const heavy = strength(change);
      if (heavier(heavy, heaviest) > 0) [strongest, heaviest] = [change, heavy];
      became_nan += change.became_nan ?? 0;
      became_inf += change.became_inf ?? 0;
    }
    const { relative, from_zero } = status === "unknown" ? {} : strongest;
    return withoutZeros({ status, relative, from_zero, became_nan, became_inf });
  };
  // As in `as_json` of changes.py, a relative change of 0 is a leaf that changed in its bits or its dtype alone.
  const withoutZeros = (change) => Object.fromEntries(Object.entries(change).filter(([name, value]) => value
    || (name === "relative" && value === 0 && change.status === "changed")));
  // Order changes as `strength` of changes.py does: a rank, and an amount within it.
  const ranks = { same: 0, unknown: 1, changed: 2, added: 3 };
  const strength = (change) => {
    if (!change) return [-1, 0];
    if (eformer.became(change)) return [6, eformer.became(change)];
    if (change.from_zero) return [5, 0];
    if (change.status === "changed" && (change.relative ?? null) === null) return [4, 0];
    return [ranks[change.status], change.relative ?? 0];
  };
  const heavier = (a, b) => a[0] - b[0] || a[1] - b[1];
  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => typeof a === "string" ? collator.compare(a, b) : Array.isArray(a) ? heavier(a, b) : a - b;

  const labelOf = (row) => row.label ??= eformer.label(row.path);
  // Match names that have the query somewhere, as text or as a glob, in any case of letters.
  const matcher = (query) => {
    const find = eformer.finder(query);
    return (row) => {
      row.names ??= [...new Set([labelOf(row), row.path])].map((name) => name.toLowerCase());
      return row.names.some(find);
    };
  };
  // Return a function that says where a query is in a name of small letters: [start, end], or null. A query with a star at one end alone has to be at the
  // other end of the name, as in *.bias. The texts between stars are found one after the other, which no query makes slow.
  eformer.finder = (query) => {
    const text = query.trim().toLowerCase();
    const texts = [""];
    for (const [one] of text.matchAll(/\*|\?|\[[^\]]+\]|[^*?[]+|\[/gu)) {
      if (one === "*") texts.push("");
      else texts[texts.length - 1] += one === "?" ? "." : one.length > 2 && one.startsWith("[") && one.endsWith("]")
        ? `[${one.slice(1, -1).replace(/[\\^]/g, "\\$&").replace(/^!/, "^")}]` : one.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    }
    const some = texts.filter(Boolean);
    if (text.startsWith("*") && !text.endsWith("*")) some.push(`${some.pop()}$`);
    if (text.endsWith("*") && !text.startsWith("*")) some.unshift(`^${some.shift()}`);
    let patterns;
    try { patterns = some.map((one) => new RegExp(one, "gsu")); } catch { return () => null; }
    return (name) => {
      let start = null, end = 0;
      for (const pattern of patterns) {
        pattern.lastIndex = end;
        const at = pattern.exec(name);
        if (!at) return null;
        start ??= at.index;
        end = pattern.lastIndex;
      }
      return [start ?? 0, end];
    };
  };
})();
