"""Forecast steps of training jobs from GPU pools, parallel plans and tiles."""

__version__ = "0.2.0"
