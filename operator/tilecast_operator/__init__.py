"""The Kubernetes operator around `tilecast`."""
