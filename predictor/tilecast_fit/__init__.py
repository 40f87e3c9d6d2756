"""Fits the utilization model of `tilecast.kernels` to measured tables and exports it to ONNX.

`python -m tilecast_fit fit` trains and writes the file, `python -m tilecast_fit card` measures it and writes
its model card. Needs the `fit` extra (JAX, optax, onnx); never part of the wheel.
"""
