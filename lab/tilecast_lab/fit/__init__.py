"""Fitting of the utilization model of `tilecast.kernels` to measured tables, and its export to ONNX.

`python -m tilecast_lab fit` trains the model and writes the file; `python -m tilecast_lab card` measures its errors and
writes its model card. Other modules fit the constants of links (`links`) and of training steps (`step`), and
trace models (`graphs`).
"""
