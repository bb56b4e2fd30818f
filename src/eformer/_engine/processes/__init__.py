"""The processes that take part in a save or a load, and how they communicate."""
