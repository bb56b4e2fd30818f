"""Names of files by which a directory is a checkpoint of Orbax."""

ORBAX_TREE = "_METADATA"
ORBAX_CHECKPOINT = "_CHECKPOINT_METADATA"
