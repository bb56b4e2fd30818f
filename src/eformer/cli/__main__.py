"""`python -m eformer.cli`, for where scripts are not on the path."""

from eformer.cli._command import main

main(prog_name="eformer")
