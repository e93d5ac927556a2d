"""Draws docs/images/profile.svg from a profile of a small model: `python docs/flame_graph.py`.

The code blocks of docs/profiles.md take the profile and sum up the time of each module.
"""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from html import escape

from drawings import BLUE, GREEN, GREY, IMAGES, PURPLE, document

WIDTH, ROW = 960, 30
COLORS = {"indexer": GREEN, "dsa_attention": PURPLE, "mla": BLUE}
"""Colors of boxes, and of everything above them."""

LOOPS = {"while", "body", "cond", "closed_call"}

Times = dict[tuple[str, ...], float]


def measured() -> Times:
    """Returns the time of each module, by its path below "forward" or "backward"."""
    page = (pathlib.Path(__file__).parent / "profiles.md").read_text()
    names: dict[str, Counter[tuple[str, ...]]] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), names)
    return names["modules"]


def boxes(times: Times, x: float, row: int, scale: float, color: str) -> list[str]:
    """Returns the boxes of one level of paths from left to right, with those above them."""
    children: dict[str, Counter[tuple[str, ...]]] = {}
    for (name, *rest), time in times.items():
        children.setdefault(name, Counter())[tuple(rest)] += time
    elements = []
    for name, inner in sorted(children.items(), key=lambda item: -sum(item[1].values())):
        width = scale * sum(inner.values())
        own = COLORS.get(name, color)
        if width >= 2:
            elements.append(box(x, row * ROW, width, own, name, width / (WIDTH / 100)))
            deeper = {path: time for path, time in inner.items() if path}
            elements += boxes(deeper, x, row + 1, scale, own)
        x += width
    return elements


def box(x: float, y: float, width: float, color: str, name: str, percent: float) -> str:
    """Returns a box with as much of its name as fits, and with all of it as a tooltip."""
    room = (width - 4) / 0.62  # in units of the font's size
    labels = (f"{name} {percent:.0f} %", name)
    shown = next((label for label in labels if room / len(label) >= 9), "")
    size = min(12, room / max(len(shown), 1))
    face = f'fill="#fff" font-size="{size:.3g}" font-family="ui-monospace, monospace"'
    return (
        f'<g><title>{escape(name)}, {percent:.1f} %</title><rect x="{x:.1f}" y="{y}" rx="3" '
        f'width="{width - 1:.1f}" height="{ROW - 2}" fill="{color}"/><text x="{x + width / 2:.1f}" '
        f'y="{y + ROW / 2 - 1}" {face} '
        f'text-anchor="middle" dominant-baseline="central">{escape(shown)}</text></g>'
    )


def flame_graph(times: Times) -> str:
    """Returns a drawing of the times, with the blocks of the decoder taken together."""
    merged: Counter[tuple[str, ...]] = Counter()
    for path, time in times.items():
        # Numbers of blocks, loops, and equations of `jnp.einsum` are left out.
        kept = [name for name in path if re.fullmatch(r"[a-z]\w*", name) and name not in LOOPS]
        merged[tuple(kept[:5])] += time
    rows = max(len(path) for path in merged)
    elements = boxes(merged, 0, 0, WIDTH / sum(merged.values()), GREY)
    return document(WIDTH, rows * ROW, "Time of the modules of a decoder", *elements)


if __name__ == "__main__":
    (IMAGES / "profile.svg").write_text(flame_graph(measured()))
