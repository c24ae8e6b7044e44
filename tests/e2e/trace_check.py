"""trace_check.py FILE [--overlap]: is this a trace as docs/status.md describes it?

Every event has name, ph, pid, tid and ts; durations are not negative; each flow has exactly one
begin and one end, in this order. --overlap: computing overlaps with what daemons do for it: forward
with updates (what later units need is fetched as it is made), backward with sums of what it
returned.
"""
import argparse
import collections
import json
import sys


def check_events(events):
    for e in events:
        for field in ("name", "ph", "pid", "tid", "ts"):
            assert field in e, f"no {field} in {e}"
        assert e["ph"] in "XiMsf", e
        assert e["ts"] >= 0, e
        if e["ph"] == "X":
            assert e["dur"] >= 0, e


def check_flows(events):
    ends = collections.defaultdict(list)
    for e in events:
        if e["ph"] in "sf":
            ends[e["id"]].append(e)
    for name, pair in ends.items():
        assert [e["ph"] for e in pair] == ["s", "f"], f"flow {name}: {pair}"
        assert pair[0]["ts"] <= pair[1]["ts"], f"flow {name} ends before it begins: {pair}"
    kinds = collections.Counter(pair[0]["name"] for pair in ends.values())
    return kinds


def spans(events, name):
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                  if e["ph"] == "X" and e["name"] == name)


def overlap_us(a, b):
    total, k = 0.0, 0
    for begin, end in a:
        while k < len(b) and b[k][1] <= begin:
            k += 1
        i = k
        while i < len(b) and b[i][0] < end:
            total += max(0.0, min(end, b[i][1]) - max(begin, b[i][0]))
            i += 1
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    with open(args.file, encoding="utf-8") as f:
        events = json.load(f)["traceEvents"]
    check_events(events)
    kinds = check_flows(events)
    forward_update = overlap_us(spans(events, "forward"), spans(events, "update"))
    backward_sum = overlap_us(spans(events, "backward"), spans(events, "sum"))
    print(f"{len(events)} events, flows {dict(kinds)}, overlap: forward with updates "
          f"{forward_update:.1f} us, backward with sums {backward_sum:.1f} us")
    if args.overlap:
        assert kinds["return"] > 0 and kinds["commit"] > 0, "flows are missing"
        assert forward_update > 0, "no forward while later units are updated"
        assert backward_sum > 0, "no backward while gradients are summed"
    return 0


if __name__ == "__main__":
    sys.exit(main())
