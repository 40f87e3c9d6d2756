"""Reading and writing the API of a Kubernetes cluster: client, cache, watch, queue, writer and lease.

Nothing here knows what the operator is for. Kinds, paths, names of fields and functions that read objects are
arguments.
"""
