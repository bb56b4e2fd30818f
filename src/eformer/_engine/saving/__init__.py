"""A save: snapshot, plan, write, commit."""
