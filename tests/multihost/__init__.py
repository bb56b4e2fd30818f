"""Several processes, really."""
