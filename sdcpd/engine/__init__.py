"""Floor 2: passes of target and draft models, directly on torch. Blocking, no clock, no randomness, no logging."""
