"""Comparison of forecasts with published measurements: training runs, memory peaks, kernels and collectives.

`commands` has what each command of `tilecast validate` runs where this distribution is installed. Read `runs` first,
which forecasts a table of measured training runs; `kernels` and `collectives` do the same for tables of single kernels
and of collectives.
"""
