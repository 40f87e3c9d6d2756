"""Show advice to people and programs: as a table, JSON, YAML, CSV. The functions are pure functions of `Advice`."""
