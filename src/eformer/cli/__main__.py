"""`python -m eformer.cli`, for where scripts are not on the path."""

from eformer.cli.commands import main

main(prog_name="eformer")
