"""An `Advice` as Kubernetes shows it: status, annotations, Events, metrics. Pure functions, but for the clock-free
instruments of `metrics`."""
