"""The record of a checkpoint as data: names, boxes, dtypes, digests, values, manifests. Pure: no jax, no files."""
