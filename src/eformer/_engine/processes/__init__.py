"""Let the processes of a save or a load communicate."""
