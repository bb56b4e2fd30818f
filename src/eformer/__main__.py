"""Run the command as `python -m eformer`, if scripts are not on the path."""

from eformer.cli.commands import main

main(prog_name="eformer")
