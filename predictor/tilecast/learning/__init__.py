"""Corrections of forecasts that are learned from measured training runs.

Read `calibration` first: it corrects the forecasts for a GPU, a model family and a workload from the runs of a cluster.
`namespace_calibration` bounds what the runs of one namespace change for others, with the estimate of `consensus`.
`job_calibration` carries the runs of one job over to its other plans and GPUs. `calibration.toml` has all variances.
"""
