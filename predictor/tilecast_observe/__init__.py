"""Measurement of optimizer steps in a training script, with reports to Tilecast's operator and to Prometheus.

`StepTimer` is for any training loop, the callbacks are for Hugging Face Trainer and Lightning. The package uses only
the standard library. In the training loop it never raises, waits for the network, or synchronises with the GPU.
"""

from tilecast_observe.callbacks import LightningCallback, TrainerCallback
from tilecast_observe.timer import StepTimer

__all__ = ["LightningCallback", "StepTimer", "TrainerCallback"]
