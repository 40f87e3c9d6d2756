"""Fitting of the utilization model of `tilecast.kernels` to measured tables, and its export to ONNX.

`python -m tilecast_fit fit` trains the model and writes the file; `python -m tilecast_fit card` measures its errors and
writes its model card. The package needs the `fit` extra (JAX, optax, onnx) and is not part of the wheel. Other modules
fit the constants of links (`links`) and of training steps (`step`), trace models (`graphs`) and measure kernels
(`collect`).
"""
