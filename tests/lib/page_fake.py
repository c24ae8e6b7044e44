"""A node that trains, as /status documents (docs/status.md), for tests of the page without daemons.

page_fake.py PAGE [--port N] [--scene NAME]: serve the assembled page and the scene, print the URL.
The page's path picks the scene too: /SCENE/ with its /SCENE/status. Documents depend on the time
alone, and on when this began, so that a test can compute what must be shown.
"""

import argparse
import http.server
import json
import math
import time
import urllib.parse

KINDS = ["state", "publish", "inbox", "board", "ledger", "spill"]
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def unit_names(count):
    return ["embed"] + [f"h.{i}" for i in range(count - 2)] + ["head"]


BEGAN = int(time.time())


def step_of(t):
    """Of a time that is no step's itself: always one with a history behind it, and never one that was before."""
    return int(t) if t < 10000 else 1000 + int(t) - BEGAN


def unit_norm(device, i, step):
    return (1 + device) * 10.0 ** -(i % 4) * (1 + step % 5)


EVERY = 8  # updates of such steps were measured


def is_skipped(step):
    return step % 16 in (5, 9)


def bad_units(step):
    return [2] if step % 16 == 9 else []


def units_answer(document, query):
    """/units of all owners of a model: of a step that was skipped, and of one that was not finite, too."""
    name = query.get("model", [""])[0]
    models = [m for d in document.get("daemons", [document]) for m in d.get("models", [])
              if name in ("", m["name"])]
    if not models:
        return None
    units, step = models[0]["units"], min(m["step"] for m in models)
    first = max(0, step - 255, int(query.get("from", ["0"])[0]))

    def row(k):
        norms = [math.hypot(*(unit_norm(m["owner"], i, k) for m in models)) for i in range(len(units))]
        shown = [None if units[i]["frozen"] or i in bad_units(k) else x for i, x in enumerate(norms)]
        measured = k % EVERY == 0 and not is_skipped(k)
        ratios = [None if x is None else 1e-3 * 10.0 ** -(i % 3) for i, x in enumerate(shown)]
        nothing = [None] * len(units)
        return {"step": k, "skipped": is_skipped(k), "divisor": 4.0, "grad": shown, "bad": bad_units(k),
                "guard": "norm_above" if k % 16 == 5 else None,
                "weight": [10.0] * len(units) if measured else nothing,
                "ratio": ratios if measured else nothing}

    answer = {"model": models[0]["name"], "owners": models[0]["owners"], "step": step, "kept": 255,
              "every": EVERY, "unit_count": len(units), "unit": 0, "units": [u["name"] for u in units],
              "next": step, "rows": [row(k) for k in range(first, step)]}
    return answer if "daemons" in document else {**answer, "owner": 0}


def model(device, owners, t, units=6, micros=4, name="gpt", behind=0, frozen=()):
    """Step k is open in the second k; in its last fifth it is applied."""
    step, part = step_of(t) - behind, t % 1.0
    names = unit_names(units) if isinstance(units, int) else units
    applying = part > 0.8
    expected = (len(names) - len(frozen)) * micros
    per_unit = [0 if n in frozen else min(micros, int(micros * part / 0.7)) for n in names]
    done = int((part - 0.8) / 0.2 * len(names)) if applying else 0
    rows = [
        {
            "name": n,
            "frozen": n in frozen,
            "elems": 12288 * (1 + i % 5),
            "returned": 0 if applying else per_unit[i],
            "version": step + (1 if i < done else 0),
            "grad_norm": None if n in frozen else unit_norm(device, i, step),
        }
        for i, n in enumerate(names)
    ]
    wobble = 1 + 0.3 * ((step * 7919 + device * 104729) % 13) / 13
    scale = len(names) * 12288 * 3
    return {
        "name": name,
        "ready": True,
        "adopted": False,
        "step": step,
        "updates": step,
        "phase": "APPLYING" if applying else "SEALED" if part > 0.7 else "OPEN",
        "owner": device,
        "owners": owners,
        "elems": scale,
        "micro_batches": micros,
        "expected": expected,
        "returned": 0 if applying else sum(per_unit),
        "waiting": 1 if 0.2 < part < 0.5 else 0,
        "units": rows,
        "bytes": {
            "state": 16 * scale,
            "publish": 4 * scale,
            "inbox": 9 * scale,
            "board": 4096 * 2,
            "ledger": 65536,
            "spill": 4 * scale if behind else 0,
            "spilled": 40 * scale if behind else 0,
        },
        "rates": {
            "steps_per_s": 1.0,
            "returns_per_s": float(expected),
            "bytes_per_s": expected * 4.0 * 12288,
        },
        "times_ms": {
            "collect": 16.4 * wobble,
            "decide": 0.8 * wobble,
            "apply": 3.1 * wobble + (4 if behind else 0),
        },
        "leases": [],
        "checkpoint": None, "saved": None,
        "last_sum_norm": 1.25,
        "last_skipped": False,
        "metrics": [3.1],
        "loss": 3.1,
        "grad_norm": 0.31,
        "lr": 0.001,
    }


def session(ident, pid, name, t, now="backward", state="running", role="trainer"):
    doing = (
        {"what": now, "unit": "h.3", "micro": pid % 4, "step": step_of(t), "since_s": 0.004}
        if role == "trainer"
        else None
    )
    return {
        "id": ident,
        "name": name,
        "pid": pid,
        "uid": 1000,
        "role": role,
        "age_s": 100 + t % 1000,
        "state": state,
        "slots": 2 if role == "trainer" else 0,
        "slots_waiting": 1 if now == "return" else 0,
        "requests_pending": 1,
        "path": "map",
        "now": doing,
    }


def daemon(device, t, models, sessions, **other):
    doc = {
        "schema": 2,
        "version": "0.2.0",
        "device": f"cpu{device}",
        "pid": 4100 + device,
        "uptime_s": t % 100000,
        "time_s": t,
        "stale_ms": 12,
        "threads": 2,
        "isa": "cpu-avx512",
        "keeper": "notify",
        "adopted": {"models": 0, "at_s": 0, "ms": 0, "refused": []},
        "requests": int(t * 40),
        "bad_frames": 0,
        "dropped_replies": 0,
        "ring_bytes": 0,
        "repeated_replies": 0,
        "models": models,
        "sessions": sessions,
        "waits": [],
        "errors": [],
    }
    doc.update(other)
    return doc


def who(pid, name="shd-gpt", **other):
    return {"session": pid % 100, "pid": pid, "name": name, **other}


def trains(t):
    """Two daemons, four workers, all well."""
    workers = [
        session(i + 1, 5200 + i, "shd-gpt", t, ["forward", "backward", "return", "wait unit"][i])
        for i in range(4)
    ]
    docs = [daemon(d, t, [model(d, 2, t)], workers) for d in range(2)]
    since = t % 1.0 * 0.3
    docs[0]["waits"] = [
        {
            "who": who(5203),
            "kind": "unit",
            "since_s": since,
            "on": [],
            "text": f"shd-gpt (pid 5203) waits {since * 1000:.0f} ms for unit h.3 of step {step_of(t)}",
        }
    ]
    return {"schema": 2, "daemons": docs}


def stopped(t):
    """A stopped worker holds up a step; one daemon spills."""
    held = 1042
    since = 3.2 + t % 600
    workers = [
        session(
            i + 1,
            5200 + i,
            "shd-gpt",
            t,
            "wait unit" if i else "forward",
            "stopped" if i == 1 else "sleeping",
        )
        for i in range(4)
    ]
    docs = []
    for d in range(4):
        m = model(d, 4, held + 0.55, micros=8, frozen=("embed",))
        m["leases"] = [
            {"group": 1, "session": 2, "age_s": since, "backup": False},
            {"group": 1, "session": 4, "age_s": 1.0, "backup": True},
        ]
        if d == 2:
            m["units"][1]["version"] -= 1
            m["units"][2]["version"] -= 2
            m["bytes"]["spill"] = 3 << 20
            m["bytes"]["spilled"] = 31 << 20
        if d == 3:
            m["checkpoint"] = {
                "step": held - 3,
                "state": "writing",
                "bytes_done": 45 << 20,
                "bytes_total": 100 << 20,
            }
        waits = [
            {
                "who": who(5203),
                "kind": "gradients",
                "since_s": since,
                "on": [who(5201, state="stopped")],
                "text": f"shd-gpt (pid 5203) waits {since:.1f} s for micro-batch 1 of step {held}: shd-gpt (pid 5201, stopped) has it",
            },
            {
                "who": who(5202),
                "kind": "turn",
                "since_s": since - 1.1,
                "on": [who(5201, state="stopped")],
                "text": f"the gradient of micro-batch 2 from shd-gpt (pid 5202) waits {since - 1.1:.1f} s for micro-batch 1",
            },
            {
                "who": who(5200),
                "kind": "slot",
                "since_s": 0.4,
                "on": [],
                "text": "shd-gpt (pid 5200) waits 0.4 s for a free gradient slot",
            },
        ]
        errors = [
            {"time_s": t - 70, "level": "warn", "text": "op=return session=2 micro=1 late by 3.2 s"},
            {
                "time_s": t - 90000,
                "level": "error",
                "text": "op=open_model model=gpt status=ENOMEM allocate 'state': 12884901888 bytes asked, 8589934592 allowed",
            },
        ]
        docs.append(daemon(d, t, [m], workers, waits=waits, errors=errors if d == 0 else []))
    return {"schema": 2, "daemons": docs}


def large(t):
    """64 units by 8 owners, 100 sessions, long names, names that are markup."""
    long_name = (
        "transformer.encoder.blocks.17.attention.output.dense.projection.weight_and_bias_with_a_long_name"
    )
    units = ["<img src=x onerror=alert(1)>", long_name] + [f"decoder.h.{i}" for i in range(62)]
    workers = [
        session(
            i + 1,
            71000 + i,
            "trainer-of-a-large-language-model-with-a-long-name" if i == 3 else "shd-gpt",
            t,
            "backward",
            "gone" if i == 7 else "running",
        )
        for i in range(99)
    ] + [session(100, 99999, "shardctl top", t, role="admin")]
    waits = [
        {
            "who": who(71000 + i),
            "kind": ["turn", "slot", "unit"][i % 3],
            "since_s": 0.9 - i * 0.01,
            "on": [],
            "text": f"shd-gpt (pid {71000 + i}) waits {0.9 - i * 0.01:.2f} s for <b>micro-batch {i}</b>",
        }
        for i in range(40)
    ]
    docs = [
        daemon(
            d,
            t,
            [
                model(
                    d,
                    8,
                    t,
                    units,
                    16,
                    "a-model-whose-name-is-rather-long-too",
                    1 if d == 5 else 0,
                    ("decoder.h.3",),
                ),
                model(d, 8, t, 3, 2, "small"),
            ],
            workers,
            waits=waits if d == 0 else [],
        )
        for d in range(8)
    ]
    return {"schema": 2, "daemons": docs}


def faults(t):
    """One daemon that refused a model, one unreachable, one stuck, one whose model failed before it had values."""
    failed = {**model(3, 4, t), "ready": False, "status": "SHD_EIO", "last_skipped": True}
    for unit in failed["units"]:
        unit.update(version=None, returned=0)
    refused = {
        "models": 1,
        "at_s": 0.2,
        "ms": 18.5,
        "refused": [
            {
                "name": "gpt-old",
                "status": "EPROTO",
                "why": "ledger of layout 3, this daemon reads 4: start the version that wrote it, or remove the segment",
            }
        ],
    }
    docs = [
        daemon(0, t, [model(0, 4, t)], [session(1, 5200, "shd-gpt", t)], adopted=refused),
        {"device": "cpu1", "error": "connect: Connection refused"},
        daemon(2, t, [model(2, 4, t - 8)], [session(1, 5200, "shd-gpt", t)], stale_ms=7421),
        daemon(3, t, [failed], []),
    ]
    return {"schema": 2, "daemons": docs}


def alone(t):
    """One daemon, its own document, in training; a worker says its unit by index."""
    doc = daemon(0, t, [model(0, 1, t)], [session(1, 5200, "shd-gpt", t)])
    doc["sessions"][0]["now"]["unit"] = 1
    return doc


def part(t):
    """One daemon of two owners, its own document."""
    return daemon(0, t, [model(0, 2, t)], [session(1, 5200, "shd-gpt", t)])


def empty(t):
    """One daemon, its own document, nothing in it."""
    return daemon(0, t, [], [])


def down(_t):
    """Nothing answers."""
    return {
        "schema": 2,
        "daemons": [{"device": f"cpu{d}", "error": "connect: No such file or directory"} for d in range(2)],
    }


SCENES = {f.__name__: f for f in (trains, stopped, large, faults, alone, part, empty, down)}


class Handler(http.server.BaseHTTPRequestHandler):
    page, scene = "", "trains"

    def do_GET(self):  # the name is http.server's
        parts = [p for p in self.path.split("?")[0].split("/") if p]
        scene = parts.pop(0) if parts and parts[0] in SCENES else self.scene
        if parts == ["status"] and not getattr(self.server, "broken", False):
            self.answer("application/json", json.dumps(SCENES[scene](time.time())))
        elif parts == ["units"] and not getattr(self.server, "dumb", False):
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            answer = units_answer(SCENES[scene](time.time()), query)
            if answer is None:
                self.send_error(404)
            else:
                self.answer("application/json", json.dumps(answer))
        elif not parts:
            with open(self.page, encoding="utf-8") as f:
                self.answer("text/html; charset=utf-8", f.read())
        else:
            self.send_error(503 if parts == ["status"] else 404)

    def answer(self, kind, text):
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", PAGE_POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


def serve(page, port=0, scene="trains"):
    """A started server; its URL is http://127.0.0.1:server_port/."""
    handler = type("Handler", (Handler,), {"page": page, "scene": scene})
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--scene", choices=SCENES, default="trains")
    args = parser.parse_args()
    server = serve(args.page, args.port, args.scene)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
