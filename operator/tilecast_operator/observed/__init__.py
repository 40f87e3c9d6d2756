"""Measured steps: which reports count, the window of a job's newest, and what the runs of a cluster teach."""
