"""Callbacks for Hugging Face Trainer and Lightning. Neither library is imported, because both call methods by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilecast_observe.parts import do_nothing
from tilecast_observe.timer import StepTimer


class TrainerCallback:
    """Callback for Hugging Face transformers: `Trainer(…, callbacks=[TrainerCallback()])`."""

    def __init__(self, timer: StepTimer | None = None) -> None:
        self.timer = timer or StepTimer()
        self._update_ended: Callable[[], None] = do_nothing

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the timer when the training loop begins."""
        self.timer.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the part "optimizer", except with DeepSpeed, whose update does not run in the trainer's optimizer."""
        if not (getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None)):
            self._update_ended = self.timer.begin("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the part "optimizer" after the weight update."""
        self._update_ended()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count an optimizer step, which includes its gradient accumulation."""
        self._update_ended()
        self.timer.step()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out the current interval: data loaders start, or an evaluation or a checkpoint has ended."""
        self.timer.skip()

    on_evaluate = on_save = on_epoch_begin

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the timer when the training loop has ended."""
        self.timer.stop()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that does nothing, for every other event that this or a later trainer has."""
        if name.startswith("on_"):
            return do_nothing
        raise AttributeError(name)


class LightningCallback:
    """Callback for Lightning with automatic optimization: `Trainer(callbacks=[LightningCallback()])`."""

    state_key = "tilecast_observe.LightningCallback"

    def __init__(self, timer: StepTimer | None = None) -> None:
        self.timer = timer or StepTimer()
        self._seen = 0
        self._part_ended: Callable[[], None] = do_nothing

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the timer when the training loop begins."""
        self._seen = getattr(trainer, "global_step", 0)
        self.timer.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin the part "forward"."""
        self._part_ended = self.timer.begin("forward")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """End the part "forward" and begin the part "backward"."""
        self._part_ended()
        self._part_ended = self.timer.begin("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """End the part "backward"."""
        self._part_ended()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the part "optimizer"."""
        self._part_ended = self.timer.begin("optimizer")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the current part, and count an optimizer step unless gradients are still accumulated."""
        self._part_ended()
        now = getattr(trainer, "global_step", self._seen + 1)
        if now != self._seen:
            self._seen = now
            self.timer.step()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Leave out the current interval: data loaders start, a validation has ended or a checkpoint is written."""
        self.timer.skip()

    on_validation_end = on_save_checkpoint = on_train_epoch_start

    def on_train_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Stop the timer when the training loop has ended, or an exception has ended it."""
        self.timer.stop()

    on_exception = on_train_end

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the callback stores nothing in checkpoints."""
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that does nothing, for every other hook that this or a later trainer has."""
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return do_nothing
        raise AttributeError(name)
