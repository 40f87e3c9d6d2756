"""Kinds of API objects that the operator reads and writes: their views in the cache, and their documents."""
