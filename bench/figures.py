"""What the benchmarks in Python share: flags that all have, and how figures are shown."""
import argparse
import json
import os
import statistics


def parser(name, about):
    p = argparse.ArgumentParser(
        prog=f"bench.sh {name}", description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    here = os.path.dirname(os.path.abspath(__file__))
    p.add_argument("--bin", default=os.path.join(here, "../build/release/bin"), help=argparse.SUPPRESS)
    p.add_argument("--json", action="store_true", help="one object a line")
    return p


def machine():
    return f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"


def show_head(a):
    if not a.json:
        print(f"{'name':<44} {'median':>10} {'min':>10} {'max':>10}  {'unit':<6} n", flush=True)


def show(a, name, unit, values):
    median, low, high = statistics.median(values), min(values), max(values)
    if a.json:
        median, low, high = (float(f"{x:.6g}") for x in (median, low, high))
        figure = {"name": name, "value": median, "unit": unit, "min": low, "max": high}
        print(json.dumps({**figure, "n": len(values)}), flush=True)
    else:
        print(f"{name:<44} {median:10.4f} {low:10.4f} {high:10.4f}  {unit:<6} {len(values)}", flush=True)
