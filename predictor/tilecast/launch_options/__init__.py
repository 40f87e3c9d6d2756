"""Launchers of training: what their options mean, one table each, from which options are read and written."""
