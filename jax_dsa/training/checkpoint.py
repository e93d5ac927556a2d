"""Checkpoints from which a run goes on exactly, bit for bit on the same machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

if TYPE_CHECKING:
    from pathlib import Path

    from jax_dsa.training.steps import TrainState


class Checkpoints:
    """The newest states of one run, kept by Orbax in a folder.

    A checkpoint is the `TrainState` (parameters, optimisers, random key, and the step, which is
    also the position in the data) and a small dictionary. Each device's part is written beside the
    training, and the checkpoint gets its final name only when complete: whenever a run is killed,
    the newest one that is named so is whole.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        step = self._manager.latest_step()
        return None if step is None else int(step)

    def clear(self) -> None:
        """Deletes all checkpoints."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def save(self, state: TrainState, facts: dict[str, Any]) -> None:
        """Starts to write a checkpoint, unless this step has one; `facts` is for JSON."""
        step = int(state.step)
        if step != self.latest():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts)
                ),
            )

    def facts(self, step: int) -> dict[str, Any]:
        """The dictionary of a checkpoint."""
        args = ocp.args.Composite(facts=ocp.args.JsonRestore())
        return dict(self._manager.restore(step, args=args)["facts"])

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a checkpoint, with the shapes, dtypes and shardings of `like`, which may be
        those of another mesh.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=args)["state"]

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()
