"""Tilecast: forecasts of training steps, from tiles."""

__version__ = "0.2.0"
