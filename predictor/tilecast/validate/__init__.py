"""Forecasts held against measurements: training runs (`runs`) and kernels (`kernels`)."""
