"""Laboratory of Tilecast: published measurements, and what is fitted to them. No user and no cluster needs it.

`validate` reads published tables and compares forecasts with them, `fit` fits what Tilecast ships, `collect` measures
kernels on a GPU.
"""
