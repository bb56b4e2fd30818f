"""Save trees: snapshot, prepare, write, commit."""
