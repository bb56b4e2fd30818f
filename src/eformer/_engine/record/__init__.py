"""What a checkpoint is, as data: names, boxes, dtypes, digests, values, manifests. Pure: no jax, no files."""
