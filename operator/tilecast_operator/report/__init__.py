"""An answer as Kubernetes shows it: status, annotations, Events. Pure functions."""
