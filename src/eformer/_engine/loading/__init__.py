"""Load trees: find, rename, select, place, fetch (plan, read, assemble), rebuild."""
