"""The Kubernetes operator of Tilecast."""
