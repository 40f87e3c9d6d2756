"""Pages about the pools, jobs and forecasts of a cluster, served by a process of its own that never writes.

It lists and watches GPUPools, TrainingJobs and QueueAdvices (`watches`), keeps what the pages show of each object
(`rows`), and writes pages without scripts (`pages`). Beside them is the form of `tilecast web`, filled with the
cluster's pools (`searches`).
"""
