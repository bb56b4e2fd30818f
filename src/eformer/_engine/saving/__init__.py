"""Save trees: snapshot, plan, write, commit."""
