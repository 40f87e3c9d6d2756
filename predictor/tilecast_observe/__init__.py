"""What a training script imports so that Tilecast learns how long its step really takes.

Standard library only. Nothing here raises into the training loop, waits for the network, or reads a GPU's queue.
"""

from tilecast_observe.callbacks import LightningCallback, TrainerCallback
from tilecast_observe.timer import StepTimer

__all__ = ["LightningCallback", "StepTimer", "TrainerCallback"]
