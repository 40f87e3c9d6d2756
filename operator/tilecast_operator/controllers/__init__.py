"""Controllers. Each reads cached objects, decides about status, annotations and Events, and writes the changes."""
