"""Jobs of ranks that run named items one after another, how each has ended, and the report about it."""
