"""Tilecast: forecasts of training steps, from tiles."""

__version__ = "0.1.0"
