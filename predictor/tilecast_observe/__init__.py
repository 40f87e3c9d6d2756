"""Measure optimizer steps in a training script, and report them to Tilecast's operator and to Prometheus.

`StepTimer` works in any training loop. The callbacks are for Hugging Face Trainer and Lightning. The package uses only
the standard library. In the training loop it never raises, waits for the network, or synchronises with the GPU.
"""

from tilecast_observe.callbacks import LightningCallback, TrainerCallback
from tilecast_observe.timer import StepTimer

__all__ = ["LightningCallback", "StepTimer", "TrainerCallback"]
