"""Benches: what the project's claims of speed are measured with. `scripts/bench` runs them; README.md says how."""
