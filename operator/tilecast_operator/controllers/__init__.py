"""Controllers: each reads objects of the cache, decides about status, annotations and Events, and writes changes."""
