"""Checkpoints from which a run resumes exactly: bit for bit on the same machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

if TYPE_CHECKING:
    from pathlib import Path

    from jax_dsa.training.steps import TrainState


class Checkpoints:
    """The newest checkpoints of one run, which Orbax keeps in a folder.

    A checkpoint consists of the `TrainState` (parameters, optimizer states, random key, and the
    step, which is also the position in the data) and a small dictionary. Each device's shards are
    written in the background while training continues. A checkpoint gets its final name only when
    it is complete, so the newest checkpoint is intact even if the run is killed while writing.

    Args:
        folder: The folder of the checkpoints.
        keep: How many checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, or None if there is no checkpoint."""
        step = self._manager.latest_step()
        return None if step is None else int(step)

    def clear(self) -> None:
        """Deletes all checkpoints."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def save(self, state: TrainState, facts: dict[str, Any]) -> None:
        """Starts to write a checkpoint, unless this step already has one.

        Args:
            state: The state to save.
            facts: A dictionary that JSON can represent.
        """
        step = int(state.step)
        if step != self.latest():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts)
                ),
            )

    def facts(self, step: int) -> dict[str, Any]:
        """Returns the dictionary of a checkpoint."""
        args = ocp.args.Composite(facts=ocp.args.JsonRestore())
        return dict(self._manager.restore(step, args=args)["facts"])

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Returns the state of a checkpoint.

        Args:
            step: The step of the checkpoint.
            like: A state with the shapes, dtypes and shardings of the result. Its mesh may differ
                from the mesh that the checkpoint was saved on.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=args)["state"]

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        self._manager.close()
