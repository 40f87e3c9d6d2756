"""The API server: a client, the lists and watches, one cache of what they show, and one writer of the differences."""
