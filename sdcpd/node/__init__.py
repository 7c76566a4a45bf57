"""Floor 6: configuration, assembly, logs, metrics and the two commands."""
