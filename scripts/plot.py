#!/usr/bin/env python3
"""plot.py [--title TEXT] [--only PREFIX] [--short] [FILE]: figures of bench.sh as an SVG on standard output.

FILE (or standard input) has what `scripts/bench.sh NAME --json` prints, an object a line:
{"name","value","unit","min","max","n"}. Each becomes a bar of its median, with a line from the smallest
round to the largest. Lines of other units than the first one's are left out.

    scripts/bench.sh step --json | scripts/plot.py --title "A step over its compute" >step.svg
"""
import argparse
import json
import sys
from xml.sax.saxutils import escape

WIDTH, LABELS, VALUES, BAR, GAP, TOP = 760, 235, 80, 18, 10, 40
END = 16  # right of the longest line
CAP = 4  # half the height of a line's ends

# As the page that shows it, which may be dark.
STYLE = """<style>
.ground { fill: #ffffff } text { fill: #1f2328 } .note { fill: #59636e } .bar { fill: #6f9bd1 }
.range { stroke: #1f2328; fill: none } .axis { stroke: #8c959f }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } text { fill: #e6edf3 } .note { fill: #9198a1 } .bar { fill: #3f6fa8 }
.range { stroke: #e6edf3 } .axis { stroke: #59636e }
}
</style>"""


def read(file, only):
    figures = []
    for line in file:
        line = line.strip()
        figure = json.loads(line) if line.startswith("{") else {}
        if {"name", "value", "unit", "min", "max"} <= figure.keys() and figure["name"].startswith(only):
            figures.append(figure)
    return [f for f in figures if f["unit"] == figures[0]["unit"]]


def shorten(figures):
    """Names without the words, between dots, that all of them begin and end with."""
    words = [f["name"].split(".") for f in figures]
    least = min(len(w) for w in words) - 1
    front = next((i for i in range(least) if len({w[i] for w in words}) > 1), least)
    back = next((i for i in range(least - front) if len({w[-1 - i] for w in words}) > 1), least - front)
    return [{**f, "name": ".".join(w[front:len(w) - back])} for f, w in zip(figures, words)]


def number(value):
    """Three digits: 0.090, 38.6, 149."""
    return f"{value:.{max(0, 3 - len(str(int(value)).lstrip('0')))}f}"


def draw(figures, title):
    unit = figures[0]["unit"]
    left = LABELS + VALUES
    scale = (WIDTH - left - END) / max(f["max"] for f in figures)
    bottom = TOP + len(figures) * (BAR + GAP)
    height = bottom + 24
    rounds = sorted({f["n"] for f in figures if "n" in f})
    count = f" of {' or '.join(str(n) for n in rounds)} rounds" if rounds else ""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' role="img" font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        STYLE,
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        f'<text x="10" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for i, f in enumerate(figures):
        y = TOP + i * (BAR + GAP)
        middle, low, high = y + BAR / 2, left + f["min"] * scale, left + f["max"] * scale
        value = f"{number(f['value'])} {escape(unit)}"
        out += [
            f'<text x="{LABELS - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(f["name"])}</text>',
            f'<text x="{left - 8}" y="{middle + 4:.1f}" text-anchor="end" font-weight="bold">{value}</text>',
            f'<rect class="bar" x="{left}" y="{y}" width="{f["value"] * scale:.1f}" height="{BAR}"/>',
            f'<path class="range" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - CAP}v{2 * CAP}'
            f'M{high:.1f} {middle - CAP}v{2 * CAP}"/>',
        ]
    out += [
        f'<line class="axis" x1="{left}" y1="{TOP - 4}" x2="{left}" y2="{bottom - GAP + 4}"/>',
        f'<text class="note" x="{left}" y="{bottom + 10}" font-size="11">bar: median{count}; line: smallest to'
        " largest</text>",
    ]
    return "\n".join(out + ["</svg>"])


def main():
    p = argparse.ArgumentParser(prog="plot.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--title", default="", help="above the bars")
    p.add_argument("--only", default="", metavar="PREFIX", help="figures whose names begin so")
    p.add_argument("--short", action="store_true", help="name them by what they differ in")
    p.add_argument("file", nargs="?", type=argparse.FileType("r", encoding="utf-8"), default=sys.stdin)
    a = p.parse_args()
    figures = read(a.file, a.only)
    if not figures:
        p.error("no figures: is it what `bench.sh NAME --json` prints?")
    print(draw(shorten(figures) if a.short else figures, a.title))


if __name__ == "__main__":
    main()
