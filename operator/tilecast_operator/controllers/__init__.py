"""One controller per concern: what it reads from the cache, what an object should say, what it writes."""
