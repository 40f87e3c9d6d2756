"""The objects of the API that the operator reads and writes: their kinds, what is kept of each, and documents."""
