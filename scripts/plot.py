#!/usr/bin/env python3
"""plot.py [--title TEXT] [--only PREFIX] [FILE]: figures of bench.sh as an SVG on standard output.

FILE (or standard input) has what `scripts/bench.sh NAME --json` prints, an object a line:
{"name","value","unit","min","max","n"}. Each becomes a bar of its median, with a line from the smallest
round to the largest. Lines of other units than the first one's are left out.

    scripts/bench.sh step --json | scripts/plot.py --title "A step over its compute" >step.svg
"""
import argparse
import json
import sys
from xml.sax.saxutils import escape

WIDTH, LABELS, BAR, GAP, TOP = 760, 290, 18, 10, 40
NUMBERS = 120  # columns right of the bars


def read(file, only):
    figures = []
    for line in file:
        line = line.strip()
        figure = json.loads(line) if line.startswith("{") else {}
        if {"name", "value", "unit", "min", "max"} <= figure.keys() and figure["name"].startswith(only):
            figures.append(figure)
    return [f for f in figures if f["unit"] == figures[0]["unit"]]


def draw(figures, title):
    unit = figures[0]["unit"]
    scale = (WIDTH - LABELS - NUMBERS) / max(f["max"] for f in figures)
    height = TOP + len(figures) * (BAR + GAP) + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="24" font-size="15" font-weight="bold" fill="#1f2328">{escape(title)}</text>',
    ]
    for i, f in enumerate(figures):
        y = TOP + i * (BAR + GAP)
        middle, right = y + BAR / 2, LABELS + f["max"] * scale
        out += [
            f'<text x="{LABELS - 8}" y="{middle + 4:.1f}" text-anchor="end" fill="#1f2328">{escape(f["name"])}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{f["value"] * scale:.1f}" height="{BAR}" fill="#4c78a8"/>',
            f'<line x1="{LABELS + f["min"] * scale:.1f}" y1="{middle}" x2="{right:.1f}" y2="{middle}"'
            ' stroke="#1f2328" stroke-width="2"/>',
            f'<text x="{right + 8:.1f}" y="{middle + 4:.1f}" fill="#1f2328">{f["value"]:g} {escape(unit)}</text>',
        ]
    return "\n".join(out + ["</svg>"])


def main():
    p = argparse.ArgumentParser(prog="plot.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--title", default="", help="above the bars")
    p.add_argument("--only", default="", metavar="PREFIX", help="figures whose names begin so")
    p.add_argument("file", nargs="?", type=argparse.FileType("r", encoding="utf-8"), default=sys.stdin)
    a = p.parse_args()
    figures = read(a.file, a.only)
    if not figures:
        p.error("no figures: is it what `bench.sh NAME --json` prints?")
    print(draw(figures, a.title))


if __name__ == "__main__":
    main()
