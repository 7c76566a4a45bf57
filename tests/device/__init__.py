"""`scripts/device_check`: proves and measures the engine on the device at hand."""
