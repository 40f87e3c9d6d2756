"""Pure functions that turn answers into statuses, annotations and Events."""
