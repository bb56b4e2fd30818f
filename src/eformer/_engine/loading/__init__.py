"""Load trees: select, place, plan, fetch, assemble."""
