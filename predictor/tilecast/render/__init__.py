"""Advice for people and programs: a table, JSON, YAML, CSV. Pure functions of `Advice`."""
