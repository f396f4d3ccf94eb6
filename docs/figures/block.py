"""Draw the README's figure of the model and one block, for light and dark pages.

    python docs/figures/block.py        # writes docs/images/block-light.svg and block-dark.svg

Coordinates are pixels of the page, from the top left. The figure consists of vector shapes only, so that no font and no
bitmap is needed to display it.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

WIDTH, HEIGHT = 900, 500
THEMES = {
    "light": dict(ink="#1f2933", soft="#66727f", line="#8a96a3", box="#f3f5f8", edge="#c3ccd6", panel="#fafbfc",
                  accent="#d9480f", tint="#fff0e6", forward="#1864ab", backward="#5f3dc4"),
    "dark": dict(ink="#e6edf3", soft="#9aa6b2", line="#78848f", box="#1c232c", edge="#46515d", panel="#12171e",
                 accent="#ff922b", tint="#33241a", forward="#74c0fc", backward="#b197fc"),
}  # fmt: skip
TOKENS, SIDE, STEP, LEFT = 17, 20, 24.5, 24  # TOKENS: 16 patches and the class token


class Canvas:
    """Drawing of boxes, arrows and text in the colours of one theme."""

    def __init__(self, axes: Axes, theme: dict[str, str]):
        self.axes, self.theme = axes, theme

    def box(self, x, y, width, height, words="", *, fill="box", edge="edge", ink="ink", size=9.0, radius=5):
        """Draw a rounded box around (x, y)."""
        corner = x - width / 2, y - height / 2
        style = f"round,pad=0,rounding_size={radius}"
        colours = dict(facecolor=self.theme[fill], edgecolor=self.theme[edge], linewidth=0.9)
        self.axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, **colours))
        if words:
            self.words(x, y, words, ink=ink, size=size)

    def words(self, x, y, words, *, ink="ink", size=9.0, align="center", weight="normal"):
        style = dict(color=self.theme[ink], fontsize=size, weight=weight)
        self.axes.text(x, y, words, ha=align, va="center_baseline", **style)

    def line(self, *points, colour="line", width=1.2):
        xs, ys = zip(*points)
        style = dict(solid_joinstyle="round", solid_capstyle="round")
        self.axes.plot(xs, ys, color=self.theme[colour], linewidth=width, **style)

    def arrow(self, *points, colour="line", width=1.2, head=5.0):
        """Draw a polyline of horizontal and vertical segments with an arrowhead at its end."""
        (x0, y0), (x, y) = points[-2:]
        length = max(abs(x - x0), abs(y - y0))
        dx, dy = (x - x0) / length, (y - y0) / length
        self.line(*points[:-1], (x - head * dx, y - head * dy), colour=colour, width=width)
        back, side = (x - 1.4 * head * dx, y - 1.4 * head * dy), 0.62 * head
        corners = [(x, y), (back[0] - side * dy, back[1] - side * dx), (back[0] + side * dy, back[1] + side * dx)]
        self.axes.add_patch(Polygon(corners, color=self.theme[colour], linewidth=0))

    def operation(self, x, y, symbol):
        colours = dict(facecolor=self.theme["box"], edgecolor=self.theme["line"], linewidth=1.2)
        self.axes.add_patch(Circle((x, y), 9, zorder=3, **colours))
        self.axes.text(x, y, symbol, ha="center", va="center", color=self.theme["ink"], fontsize=11, zorder=4)


def draw_photo(axes: Axes, x: float, y: float, scale: float, crop: tuple[float, float, float]) -> None:
    """Draw the square (left, top, side) of a 100x100 landscape, scaled, with its corner at (x, y)."""
    left, top, side = crop

    def place(points):
        return [(x + scale * (px - left), y + scale * (py - top)) for px, py in points]

    shapes = [
        ("#a5d8ff", [(0, 0), (100, 0), (100, 38), (0, 38)]),
        ("#d0ebff", [(0, 38), (100, 38), (100, 70), (0, 70)]),
        ("#748ffc", [(0, 68), (0, 56), (22, 30), (40, 52), (58, 24), (86, 60), (100, 50), (100, 68)]),
        ("#69db7c", [(0, 62), (30, 56), (62, 66), (100, 58), (100, 84), (0, 84)]),
        ("#2f9e44", [(0, 80), (40, 72), (70, 82), (100, 74), (100, 100), (0, 100)]),
    ]
    frame = Rectangle((x, y), scale * side, scale * side, transform=axes.transData)
    patches = [Polygon(place(points), facecolor=colour, linewidth=0) for colour, points in shapes]
    patches.insert(2, Circle(place([(76, 20)])[0], 11 * scale, facecolor="#ffe066", linewidth=0))
    for patch in patches:
        axes.add_patch(patch)
        patch.set_clip_path(frame)


def token_x(i: int) -> float:
    return LEFT + STEP * i


def draw_image(canvas: Canvas) -> None:
    """Draw the photo with its patch grid, and the token sequence with the class token in the middle."""
    axes, theme = canvas.axes, canvas.theme
    draw_photo(axes, LEFT, 28, 1.0, (0, 0, 100))
    for i in range(1, 4):
        for ends in ([(LEFT + 25 * i, 28), (LEFT + 25 * i, 128)], [(LEFT, 28 + 25 * i), (LEFT + 100, 28 + 25 * i)]):
            axes.plot(*zip(*ends), color="white", linewidth=1.4, solid_capstyle="butt")
    canvas.words(142, 46, "Image", align="left", weight="bold", size=10)
    canvas.words(142, 68, "cut into patches of 16 × 16 pixels,", align="left", ink="soft")
    canvas.words(142, 85, "each projected to one token of width C;", align="left", ink="soft")
    canvas.words(142, 102, "the class token joins in the middle", align="left", ink="soft")
    canvas.arrow((LEFT + 50, 134), (LEFT + 50, 168))
    for i in range(TOKENS):
        if i == 8:
            canvas.box(token_x(i) + SIDE / 2, 188, SIDE, SIDE, "cls", fill="tint", edge="accent", ink="accent", size=7)
        else:
            row, column = divmod(i - (i > 8), 4)
            draw_photo(axes, token_x(i), 178, SIDE / 25, (25 * column, 25 * row, 25))
    canvas.words(11, 215, "+", size=12, ink="soft")
    for i in range(TOKENS):
        colours = dict(facecolor=theme["accent"] if i == 8 else theme["line"], linewidth=0)
        axes.add_patch(
            Rectangle((token_x(i), 212), SIDE, 5, alpha=0.9 if i == 8 else 0.2 + 0.6 * abs(8 - i) / 8, **colours)
        )
    canvas.words(token_x(8) + SIDE / 2, 230, "learned position embedding", ink="soft")


def draw_stack(canvas: Canvas) -> None:
    """Draw the blocks over all tokens, and the path of the class token to the head."""
    middle, right = token_x(8) + SIDE / 2, token_x(16) + SIDE
    canvas.arrow((middle, 240), (middle, 256))
    for shift in (8, 4, 0):
        canvas.box(middle + shift, 300 + shift, right - LEFT, 76, fill="box")
    canvas.words(middle, 276, "24 blocks", weight="bold", size=10)
    canvas.arrow((LEFT + 108, 299), (right - 16, 299), colour="forward", width=1.6)
    canvas.words(LEFT + 14, 299, "first to last", ink="forward", align="left")
    canvas.arrow((right - 108, 321), (LEFT + 16, 321), colour="backward", width=1.6)
    canvas.words(right - 14, 321, "last to first", ink="backward", align="right")
    canvas.arrow((middle, 348), (middle, 366))
    for i in range(TOKENS):
        ours = dict(fill="tint", edge="accent", ink="accent") if i == 8 else {}
        canvas.box(token_x(i) + SIDE / 2, 380, SIDE, SIDE, "cls" if i == 8 else "", size=7, radius=3, **ours)
    canvas.arrow((middle, 392), (middle, 424), (middle + 33, 424), colour="accent")
    canvas.box(middle + 72, 424, 76, 24, "RMSNorm")
    canvas.arrow((middle + 111, 424), (middle + 131, 424))
    canvas.box(middle + 156, 424, 48, 24, "head")
    canvas.arrow((middle + 156, 437), (middle + 156, 456))
    canvas.words(middle + 156, 467, "class", weight="bold", size=10)
    canvas.words(LEFT, 424, "scan", ink="accent", weight="bold", size=10, align="left")
    canvas.words(LEFT, 445, r"$S_n \leftarrow S_n + \varepsilon\, k_n\, (v - k_n S_n)$", align="left", size=9.5)
    canvas.words(LEFT, 467, r"$y = q \cdot S + \mathrm{skip}\; v$", align="left", size=9.5)


def draw_block(canvas: Canvas) -> None:
    """Draw one block: norm, projection to u and z, a scan of u in each direction, mean, gate by z, projection,
    residual.
    """
    ahead, back, gate, residual = 560, 672, 768, 852
    middle = (ahead + back) / 2
    for y, corner in ((266, 34), (342, 466)):  # connect the stack of blocks to the panel of one block
        canvas.line((token_x(16) + SIDE + 10, y), (482, corner), colour="edge", width=0.8)
    canvas.box(684, 250, 404, 452, fill="panel", radius=12)
    canvas.words(500, 46, "One block", weight="bold", size=10, align="left")
    canvas.arrow((middle, 12), (middle, 58))
    canvas.line((middle, 44), (residual, 44), (residual, 420))
    canvas.words(residual - 8, 250, "residual", ink="soft", align="right", size=8.5)
    canvas.box(middle, 70, 84, 22, "RMSNorm")
    canvas.arrow((middle, 81), (middle, 94))
    canvas.box(middle, 106, 84, 22, "in_proj")
    canvas.line((middle, 117), (middle, 134))
    canvas.arrow((middle, 134), (ahead, 134), (ahead, 164), colour="forward")
    canvas.arrow((middle, 134), (back, 134), (back, 164), colour="backward")
    canvas.words(middle, 146, "u", size=10)
    canvas.arrow((middle + 42, 106), (gate, 106), (gate, 322))
    canvas.words(gate - 12, 122, "z", size=10)
    for x, colour, outer in ((ahead, "forward", -1), (back, "backward", 1)):
        canvas.box(x, 176, 84, 22, "conv1d")
        canvas.arrow((x, 187), (x, 200), colour=colour)
        canvas.box(x, 212, 84, 22, "SiLU")
        canvas.arrow((x, 223), (x, 242), colour=colour)
        canvas.box(x, 254, 84, 22, "x_proj")
        canvas.arrow((x, 265), (x, 288), colour=colour)
        canvas.arrow((x, 231), (x + 50 * outer, 231), (x + 50 * outer, 303), (x + 43 * outer, 303), colour=colour)
        canvas.box(x, 303, 84, 28, "scan", fill="tint", edge="accent", ink="accent", size=10)
        canvas.line((x, 317), (x, 346), (middle, 346), colour=colour)
    canvas.words(middle, 275, "step, k, q", ink="soft", size=8.5)
    canvas.words(ahead - 60, 267, "v", ink="soft", size=10)
    canvas.words(back + 60, 267, "v", ink="soft", size=10)
    canvas.arrow((middle, 346), (middle, 359))
    canvas.box(gate, 334, 58, 22, "SiLU")
    canvas.box(middle, 370, 84, 22, "mean")
    canvas.arrow((middle, 381), (middle, 393))
    canvas.operation(middle, 402, "×")
    canvas.arrow((gate, 345), (gate, 402), (middle + 9, 402))
    canvas.words(gate - 40, 393, "gate", ink="soft", size=8.5)
    canvas.arrow((middle, 411), (middle, 422))
    canvas.box(middle, 433, 84, 22, "out_proj")
    canvas.arrow((middle, 444), (middle, 452))
    canvas.operation(middle, 461, "+")
    canvas.arrow((residual, 420), (residual, 461), (middle + 9, 461))
    canvas.arrow((middle, 470), (middle, 494))


def draw(theme: str) -> Figure:
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    canvas = Canvas(axes, THEMES[theme])
    draw_block(canvas)
    draw_image(canvas)
    draw_stack(canvas)
    return figure


def main() -> None:
    folder = Path(__file__).parents[1] / "images"
    matplotlib.rcParams.update({"svg.hashsalt": "block", "mathtext.fontset": "dejavusans"})
    for theme in THEMES:
        draw(theme).savefig(folder / f"block-{theme}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
