"""Controllers, which read cached objects, decide about status, annotations and Events, and write the changes."""
