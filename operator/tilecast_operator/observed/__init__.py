"""Measured steps: which reports count, a job's newest reports, and the corrections learned from runs."""
