"""Names of files by which a directory is a checkpoint of another program."""

ORBAX_TREE = "_METADATA"
PEFT_CONFIG = "adapter_config.json"
ORBAX_CHECKPOINT = "_CHECKPOINT_METADATA"
