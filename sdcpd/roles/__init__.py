"""Floor 4: router, drafter, verifier and cache as trio tasks around the protocol's machines."""
