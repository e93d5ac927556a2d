"""Writes tests/references: results of the attention layers of `transformers`, one file per model.

Run it from the repository's root with the extra `parity` installed:

    PYTHONPATH=tests python -m support.write_parity_references

tests/test_parity_references.py compares our layers with the files, which needs neither torch nor
`transformers`. A file holds

- `config`: the model's configuration as JSON, and `versions`, with which the file was written;
- `rope_alpha`: the parameter of the rotary embedding, if there is one;
- `outputs`, `input_gradients`: `kept_columns` of the results of all layers;
- `selection LAYER`: the selected keys or blocks, of layers that select some;
- `gradient LAYER NAME`: `kept_numbers` of the gradients of weights.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from support.parity import BATCH, MODELS, SIZES, run_hf, stack, torch, transformers
from support.parity_references import FOLDER, inputs, kept_columns, kept_numbers, weight


def results(kind: str) -> dict[str, Any]:
    """Returns the arrays of a model's file."""
    config, rotary, layers, _ = stack(kind)
    for i, layer in enumerate(layers):
        for name, p in layer.named_parameters():
            p.data = torch.from_numpy(weight(kind, i, name, tuple(p.shape)))
    x, cotangents = inputs(len(layers), BATCH, SIZES["hidden_size"])
    leaf = torch.tensor(x, requires_grad=True)
    outs, selections = run_hf(kind, list(leaf))
    sum((o * torch.tensor(c)).sum() for o, c in zip(outs, cotangents, strict=True)).backward()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    arrays: dict[str, Any] = {"config": json.dumps(config.to_dict()), "versions": versions}
    if hasattr(rotary, "alpha"):
        arrays["rope_alpha"] = rotary.alpha.detach().numpy()
    arrays["outputs"] = kept_columns(np.stack([o.detach().numpy() for o in outs]))
    arrays["input_gradients"] = kept_columns(leaf.grad.numpy())
    for i, (layer, selection) in enumerate(zip(layers, selections, strict=True)):
        if selection is not None:
            arrays[f"selection {i}"] = selection.astype(np.int16)
        for name, p in layer.named_parameters():
            if p.grad is not None:
                arrays[f"gradient {i} {name}"] = kept_numbers(p.grad.numpy())
    return arrays


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for kind in MODELS:
        np.savez_compressed(FOLDER / f"{kind}.npz", **results(kind))
        print(f"{kind}: {(FOLDER / f'{kind}.npz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
