"""Corrections of forecasts that are learned from measured training runs.

Read `calibration` first: it corrects the forecasts for a GPU, a model family and a workload from the runs of a cluster.
`namespace_calibration` limits how much the runs of one namespace change forecasts of other namespaces. It uses the
estimate of `consensus`. `job_calibration` corrects forecasts of a job from runs of that job with other plans or on
other GPUs. `calibration.toml` has all variances.
"""
