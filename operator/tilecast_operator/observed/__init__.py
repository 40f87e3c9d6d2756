"""Measured steps: which reports count, the window of a job's newest reports, and the corrections learned from runs."""
