"""Distilling a small draft model: beside the benches, since it makes and measures, and no node ever imports it."""
