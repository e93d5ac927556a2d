"""Draws docs/images/{flow,block_lists,mesh_*}.svg: `python docs/drawings.py`.

The background is transparent, and every text has a box of its own color behind it, so that the
drawings are readable on light and on dark pages.
"""

from __future__ import annotations

import pathlib
from html import escape

IMAGES = pathlib.Path(__file__).parent / "images"
GREY, GREEN, BLUE, PURPLE = "#5f6773", "#2b7a4b", "#2f66b0", "#7a3f9d"
LINE = "#8a929e"
DEVICES = ("#2f66b0", "#2b7a4b", "#b3541e", "#7a3f9d")


def document(width: int, height: int, title: str, *elements: str) -> str:
    """Returns an SVG file with these elements."""
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            f"<defs>{tip}</defs>",
            *elements,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, size: int = 14, code: bool = False) -> str:
    """Returns white text that is centered at (x, y)."""
    face = ' font-family="ui-monospace, monospace"' if code else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="#fff" font-size="{size}"{face} text-anchor="middle" '
        f'dominant-baseline="central">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, color: str, *lines: str) -> str:
    """Returns a box with lines of text. The first line is code."""
    elements = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{color}"/>'
    ]
    for i, line in enumerate(lines):
        middle = y + height / 2 + 18 * (i - (len(lines) - 1) / 2)
        elements.append(text(x + width / 2, middle, line, 15 if i == 0 else 12, code=i == 0))
    return "\n".join(elements)


def label(x: float, y: float, words: str) -> str:
    """Returns a small box of text for an arrow, centered at (x, y)."""
    width = 7.4 * len(words) + 12
    return box(x - width / 2, y - 9, width, 18, GREY) + "\n" + text(x, y, words, 12, code=True)


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    """Returns a line through the points with an arrowhead at the last one."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"{dash} '
        'marker-end="url(#tip)"/>'
    )


def flow() -> str:
    """Returns the data flow of one layer, with the names of our functions."""
    left, right = 115, 365  # centers of the columns
    frame = (
        f'<rect x="4" y="206" width="488" height="330" rx="10" fill="none" stroke="{LINE}" '
        'stroke-width="2" stroke-dasharray="2 4"/>'
    )
    return document(
        496,
        658,
        "Data flow of DeepSeek Sparse Attention: the indexer selects keys, sparse_mla attends to "
        "them, attn_dist teaches the indexer",
        box(140, 4, 200, 34, GREY, "hidden states x"),
        arrow((200, 38), (left, 76)),
        label(140, 56, "stop_gradient"),
        arrow((280, 38), (right, 76)),
        box(12, 78, 206, 46, GREEN, "nn.LightningIndexer", "small heads, small dims"),
        box(262, 78, 206, 46, BLUE, "nn.MLA", "latent attention's projections"),
        frame,
        arrow((left, 124), (left, 250)),
        label(left, 146, "index_q"),
        label(left, 167, "index_k"),
        label(left, 188, "index_weights"),
        arrow((right, 124), (right, 338)),
        label(right, 156, "q"),
        label(right, 178, "kv"),
        box(190, 193, 146, 26, GREY, "dsa_attention"),
        box(
            12, 252, 206, 64, GREEN, "indexer_topk", "scores every visible key,", "keeps the best K"
        ),
        arrow((218, 300), (240, 300), (240, 362), (260, 362)),
        label(240, 326, "indices"),
        box(262, 340, 206, 48, BLUE, "sparse_mla", "attends to those K keys"),
        arrow((right - 50, 388), (right - 50, 454)),
        label(right - 50, 418, "lse"),
        box(
            262,
            456,
            206,
            64,
            PURPLE,
            "attn_dist",
            "what attention looked at,",
            "summed over the heads",
        ),
        arrow((262, 488), (220, 488)),
        arrow((left, 316), (left, 454)),
        label(left, 384, "logits"),
        box(
            12,
            456,
            206,
            64,
            PURPLE,
            "indexer_kl_loss",
            "the indexer learns to find",
            "what attention looks at",
        ),
        arrow((left, 520), (left, 586)),
        label(left, 556, "kl"),
        arrow(
            (right + 70, 388), (right + 70, 442), (480, 442), (480, 560), (right, 560), (right, 586)
        ),
        label(right + 70, 414, "out"),
        box(
            12,
            588,
            206,
            64,
            GREEN,
            "indexer's gradients",
            "other parameters get",
            "no gradient of kl",
        ),
        box(
            262,
            588,
            206,
            64,
            BLUE,
            "language-model loss",
            "gradients for q and kv,",
            "not for the indexer",
        ),
    )


def _tensor(x: float, y: float, name: str, shards: int | None, exchanged: bool = False) -> str:
    """Returns a row with the shards of an array on 4 devices, or with the whole array on each."""
    elements = [box(x, y, 96, 30, GREY) + text(x + 48, y + 15, name, 12, code=True)]
    for device, color in enumerate(DEVICES):
        left = x + 104 + 68 * device
        words = "all" if shards is None else f"{device + 1} of {shards}"
        elements.append(box(left, y, 64, 30, color) + text(left + 32, y + 15, words, 12))
    if exchanged:
        elements.append(
            f'<rect x="{x + 100}" y="{y - 3}" width="276" height="36" rx="8" fill="none" '
            f'stroke="{LINE}" stroke-width="2" stroke-dasharray="5 4"/>'
        )
    return "\n".join(elements)


# For each drawing the title, the number of shards of each array (None: every device holds the whole
# array), and the arrays that are exchanged.
MESHES: dict[str, tuple[str, dict[str, int | None], tuple[str, ...]]] = {
    "batch": ("Batch sharded", {"q": 4, "kv": 4, "out": 4, "dkv": 4}, ()),
    "queries": (
        "Queries sharded, keys replicated",
        {"q": 4, "kv": None, "out": 4, "dkv": None},
        ("dkv",),
    ),
    "keys": ("Queries and keys sharded", {"q": 4, "kv": 4, "out": 4, "dkv": 4}, ("kv", "dkv")),
    "heads": (
        "Heads sharded",
        {"q": 4, "kv": None, "indices": 4, "out": 4, "dkv": None},
        ("indices", "dkv"),
    ),
}


def mesh(title: str, arrays: dict[str, int | None], exchanged: tuple[str, ...]) -> str:
    """Returns a drawing with one row per array and one column per device."""
    header = [
        box(4 + 104 + 68 * d, 4, 64, 24, GREY) + text(140 + 68 * d, 16, f"GPU {d}", 12)
        for d in range(len(DEVICES))
    ]
    rows = [
        _tensor(4, 38 + 40 * i, name, shards, name in exchanged)
        for i, (name, shards) in enumerate(arrays.items())
    ]
    return document(384, 40 + 40 * len(arrays), title, *header, *rows)


# The lists of queries 92 to 95 for each KV head, with its color. Blocks have 16 keys.
LISTS = {
    "KV head 0: query heads 0 to 3": (GREEN, [(0, 2), (0, 2), (0, 3), (0, 3)]),
    "KV head 1: query heads 4 to 7": (PURPLE, [(1, 4), (1, 4), (1, 4), (2, 4)]),
}


def _block(x: float, y: float, color: str, seen: int) -> str:
    """Returns a block of 16 keys, of which the first `seen` ones are colored."""
    frame = (
        f'<rect x="{x:g}" y="{y:g}" width="48" height="24" fill="none" stroke="{LINE}" '
        'stroke-dasharray="2 3"/>'
    )
    part = f'<rect x="{x:g}" y="{y:g}" width="{3 * seen}" height="24" fill="{color}"/>'
    return frame + part if seen else frame


def block_lists() -> str:
    """Returns the blocks of keys that four queries see, a panel for each KV head."""
    elements = [box(4, 4, 98, 24, GREY) + text(53, 16, "block", 12)]
    for j in range(7):
        elements.append(box(112 + 52 * j, 4, 48, 24, GREY))
        elements.append(text(136 + 52 * j, 16, str(j), 12, code=True))
    elements.append(box(482, 4, 76, 24, GREY) + text(520, 16, "indices", 12, code=True))
    for panel, (name, (color, lists)) in enumerate(LISTS.items()):
        top = 38 + 152 * panel
        elements.append(box(4, top, 554, 24, color) + text(281, top + 12, name, 12))
        for i, listed in enumerate(lists):
            y, query = top + 30 + 28 * i, 92 + i
            elements.append(box(4, y, 98, 24, GREY) + text(53, y + 12, f"query {query}", 12))
            for j in range(7):
                own = min(16, query + 1 - 16 * j)
                seen, shade = (16, color) if j in listed else (own if j == 5 else 0, BLUE)
                elements.append(_block(112 + 52 * j, y, shade, seen))
            elements.append(box(482, y, 76, 24, color))
            elements.append(text(520, y + 12, str(list(listed)), 12, code=True))
    return document(
        562,
        336,
        "Each KV head has a list of blocks for every query. The block that has the query's "
        "position is seen up to the query",
        *elements,
    )


def main() -> None:
    """Writes all drawings."""
    (IMAGES / "flow.svg").write_text(flow())
    (IMAGES / "block_lists.svg").write_text(block_lists())
    for name, drawing in MESHES.items():
        (IMAGES / f"mesh_{name}.svg").write_text(mesh(*drawing))


if __name__ == "__main__":
    main()
