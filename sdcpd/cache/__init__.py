"""Floor 1: the multi-level cache (MLC) of this node. Blocking, no clock, no randomness, no logging."""
