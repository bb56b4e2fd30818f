"""Who takes part in a save or a load, and how they meet."""
