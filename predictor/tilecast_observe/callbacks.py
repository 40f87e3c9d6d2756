"""Callbacks for Hugging Face Trainer and Lightning, which are not imported: they call what they find by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilecast_observe.timer import StepTimer


def _nothing(*_: object, **__: object) -> None:
    return None


class TrainerCallback:
    """`Trainer(…, callbacks=[TrainerCallback()])` of Hugging Face transformers."""

    def __init__(self, timer: StepTimer | None = None) -> None:
        self.timer = timer or StepTimer()
        self._update_ended: Callable[[], None] = _nothing

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The loop begins."""
        self.timer.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The weight update begins; DeepSpeed's is none of the optimizer that the trainer calls."""
        if not (getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None)):
            self._update_ended = self.timer.begin("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The weights are updated."""
        self._update_ended()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step has ended, gradient accumulation included."""
        self._update_ended()
        self.timer.step()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Loaders start anew."""
        self.timer.skip()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation has ended."""
        self.timer.skip()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint was written."""
        self.timer.skip()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The loop has ended."""
        self.timer.stop()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Every other event of the trainer, of this version or a later one: nothing is done."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)


class LightningCallback:
    """`Trainer(callbacks=[LightningCallback()])` of Lightning, with automatic optimization."""

    state_key = "tilecast_observe.LightningCallback"

    def __init__(self, timer: StepTimer | None = None) -> None:
        self.timer = timer or StepTimer()
        self._seen = 0
        self._part_ended: Callable[[], None] = _nothing

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loop begins."""
        self._seen = getattr(trainer, "global_step", 0)
        self.timer.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A forward pass begins."""
        self._part_ended = self.timer.begin("forward")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The forward pass has ended, and the backward pass begins."""
        self._part_ended()
        self._part_ended = self.timer.begin("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward pass has ended."""
        self._part_ended()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The weight update begins."""
        self._part_ended = self.timer.begin("optimizer")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch has ended, and with it an optimizer step unless gradients are still accumulated."""
        self._part_ended()
        now = getattr(trainer, "global_step", self._seen + 1)
        if now != self._seen:
            self._seen = now
            self.timer.step()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Loaders start anew."""
        self.timer.skip()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """A validation has ended."""
        self.timer.skip()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """A checkpoint is being written."""
        self.timer.skip()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The loop has ended."""
        self.timer.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The loop was left early."""
        self.timer.stop()

    def state_dict(self) -> dict[str, Any]:
        """Nothing goes into checkpoints."""
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Every other hook of the trainer, of this version or a later one: nothing is done."""
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return _nothing
        raise AttributeError(name)
