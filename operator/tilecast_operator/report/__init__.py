"""Pure functions that turn advice outcomes into statuses, annotations and Events."""
