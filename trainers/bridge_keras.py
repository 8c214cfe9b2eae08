"""A callback for `fit` of tf_keras that reports progress. `BackupAndRestore` saves the state."""

from __future__ import annotations

from typing import Any

import tf_keras

from trainers import bridge


class BridgeKerasCallback(tf_keras.callbacks.Callback):
    """Report every batch. Pass it to `fit` after `BackupAndRestore`, which saves at the end of each epoch."""

    def __init__(self, *, epochs: int, steps_per_epoch: int) -> None:
        super().__init__()
        self._total, self._steps_per_epoch = epochs * steps_per_epoch, steps_per_epoch
        self._epoch = 0
        self._saved: int | None = None
        bridge.listen()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._saved = epoch * self._steps_per_epoch or None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = self._epoch * self._steps_per_epoch + batch + 1
        bridge.progress(step, self._total, float((logs or {}).get("loss", "nan")), checkpoint_step=self._saved)
