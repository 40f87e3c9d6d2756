"""Controllers, one per concern: each reads the cache, decides what an object should say, and writes that."""
