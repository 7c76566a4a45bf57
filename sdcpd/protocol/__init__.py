"""Floor 0: the draft as values and synchronous machines. No clock, no randomness, no I/O, no async."""
