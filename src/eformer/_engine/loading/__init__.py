"""A load: select, place, plan, fetch, assemble."""
