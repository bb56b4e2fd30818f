"""Represent the record of a checkpoint: names, boxes, dtypes, digests, values, manifests. No jax, no files."""
