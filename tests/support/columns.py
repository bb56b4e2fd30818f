"""Read the columns of a page as its script does: the paths of rows, and what is said of each leaf."""

STATUSES = {"s": "same", "c": "changed", "a": "added", "u": "unknown"}


def paths_of(depths, parts):
    """Return (path, is_leaf) for each row, given its depth and the part that its path ends with."""
    above, found = [], []
    for n, (depth, part) in enumerate(zip(depths, parts, strict=True)):
        del above[depth:]
        above.append(part)
        is_leaf = n > 0 and (n + 1 == len(depths) or depths[n + 1] <= depth)
        path = ".".join(above[1:])
        if is_leaf:
            path = ".".join(one for one in path.split(".") if not one.startswith(("%*", "%=")))
        found.append((path, is_leaf))
    return found


def leaf_paths(columns):
    """Return the paths of the leaves, in the order of the columns."""
    rows = paths_of(columns["depth"], [columns["parts"][n] for n in columns["part"]])
    return [path for path, is_leaf in rows if is_leaf]


def numbers_of(columns):
    """Return the place of each leaf among all leaves, by its path."""
    return {path: n for n, path in enumerate(leaf_paths(columns))}


def is_in(runs, n):
    """Tell whether the flag of a number is set, given the lengths of runs."""
    return [bool(k % 2) for k, length in enumerate(runs) for _ in range(length)][n]


def statistics_of(columns, path, names=("min", "max", "mean", "std")):
    """Return the statistics of a leaf; None if it was not measured."""
    found, n = columns["statistics"], numbers_of(columns)[path]
    if not found or not is_in(found["of"], n):
        return None
    at = sum(is_in(found["of"], k) for k in range(n))
    return {name: found[name][at] for name in names}


def verdicts_in(columns):
    """Return status, and how many elements became NaN and infinite, of each leaf by its path."""
    changes = columns["changes"]
    counts = [{int(n): count for n, count in changes[name].items()} for name in ("became_nan", "became_inf")]
    return {
        path: (STATUSES[changes["status"][n]], *(found.get(n, 0) for found in counts))
        for path, n in numbers_of(columns).items()
    }
