"""Floor 3: draft sources and the choice of M (draft 6.2). Blocking, no clock, no randomness, no logging."""
