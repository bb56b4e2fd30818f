"""Reports of a checkpoint, of the changes between two checkpoints, and of a run, as HTML pages."""
