"""Reports: what is in a checkpoint, what changed between two, and how a run went, as one HTML page."""
