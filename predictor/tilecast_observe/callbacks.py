"""Callbacks for Hugging Face Trainer and Lightning; neither is imported, since both call methods by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilecast_observe.timer import StepTimer


def _do_nothing(*_: object, **__: object) -> None:
    return None


class TrainerCallback:
    """Callback for Hugging Face transformers: `Trainer(…, callbacks=[TrainerCallback()])`."""

    def __init__(self, timer: StepTimer | None = None) -> None:
        self.timer = timer or StepTimer()
        self._update_ended: Callable[[], None] = _do_nothing

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
        """Leave out the current interval, in which data loaders start for a new epoch."""
        self.timer.skip()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out the current interval, in which an evaluation has ended."""
        self.timer.skip()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out the current interval, in which a checkpoint was written."""
        self.timer.skip()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the timer when the training loop has ended."""
        self.timer.stop()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method that does nothing for every other event of the trainer, of this version or a later one."""
        if name.startswith("on_"):
            return _do_nothing
        raise AttributeError(name)


class LightningCallback:
    """Callback for Lightning with automatic optimization: `Trainer(callbacks=[LightningCallback()])`."""

    state_key = "tilecast_observe.LightningCallback"

    def __init__(self, timer: StepTimer | None = None) -> None:
        self.timer = timer or StepTimer()
        self._seen = 0
        self._part_ended: Callable[[], None] = _do_nothing

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

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave out the current interval, in which data loaders start for a new epoch."""
        self.timer.skip()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave out the current interval, in which a validation has ended."""
        self.timer.skip()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Leave out the current interval, in which a checkpoint is written."""
        self.timer.skip()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the timer when the training loop has ended."""
        self.timer.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the timer when an exception ends the training loop."""
        self.timer.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the callback stores nothing in checkpoints."""
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method that does nothing for every other hook of the trainer, of this version or a later one."""
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return _do_nothing
        raise AttributeError(name)
