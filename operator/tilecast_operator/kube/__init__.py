"""Read and write the API of a Kubernetes cluster: client, cache, watch, queue, writer and lease.

Nothing here knows the purpose of the operator. Kinds, paths, field names and functions that read objects are arguments.
"""
