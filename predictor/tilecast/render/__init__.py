"""Format advice for people and for programs: as a table, HTML, JSON, YAML or CSV. No function has side effects."""
