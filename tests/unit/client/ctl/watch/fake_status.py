#!/usr/bin/env python3
"""Daemons' status sockets without daemons: DIR/DEVICE.status with documents that change.

fake_status.py DIR DEVICE=MODE...   prints "ready" and serves until killed. Modes:
  good     schema 2; a step each 0.3 s; two workers. While the file DIR/stop exists worker 13 is
           stopped and worker 12 waits for it.
  late     the same, but it tells of a wait nine tenths later
  chunked  the same, in chunks;   many  40 workers;   stuck  the loop has not turned for 9 s
  refused  a model was not adopted
  silent   accepts, never answers;   trickle  a byte a second;   half  breaks off
  junk     no HTTP;   nojson;   types  wrong types everywhere;   huge  numbers out of all range
  control  escape sequences in every text;   big  10 MB;   endless  without end
  deep     a million brackets;   http404;   list  a document that is a list
"""
import json
import os
import socket
import sys
import threading
import time

start = time.time()


def worker(pid, now, state="sleeping", name="shd-gpt"):
    return {"id": pid * 7, "name": name, "pid": pid, "uid": 0, "role": "trainer", "age_s": 9.5,
            "state": state, "slots": 4, "slots_waiting": pid % 5, "requests_pending": 0,
            "path": "map", "now": now}


def document(d, device, mode):
    t = time.time() - start
    step = int(t / 0.3)
    stop = os.path.join(d, "stop")
    stopped = os.path.exists(stop)
    since = time.time() - os.stat(stop).st_mtime if stopped else 0.0
    since *= 0.1 if mode == "late" else 1
    index = int("".join(c for c in device if c.isdigit()) or 0)
    now = {"what": "backward", "unit": "blk.%d" % (step % 4), "micro": step % 8, "step": step,
           "since_s": 0.02}
    wait = {"what": "prepare", "unit": None, "micro": None, "step": step, "since_s": since}
    workers = [worker(12, wait if stopped else now),
               worker(13, now, "stopped" if stopped else "running")]
    if mode == "many":
        workers = [worker(100 + i, now, name="w%d" % i) for i in range(40)]
    waits = []
    if stopped:
        waits.append({"who": {"session": 84, "pid": 12, "name": "shd-gpt"}, "kind": "gradients",
                      "text": "shd-gpt (pid 12) waits %.1f s for micro-batch 1 of step %d: "
                              "shd-gpt (pid 13, stopped) has it" % (since, step),
                      "since_s": since,
                      "on": [{"session": 91, "pid": 13, "name": "shd-gpt", "state": "stopped"}]})
    units = [{"name": "blk.%d" % i, "frozen": False, "elems": 1000, "version": step,
              "returned": 3} for i in range(4)]
    model = {"name": "gpt", "ready": True, "adopted": False, "status": "SHD_OK", "step": step,
             "phase": "OPEN", "updates": step, "owner": index, "owners": 2, "elems": 4000,
             "micro_batches": 8, "expected": 32, "returned": int(t * 10) % 33, "waiting": 0,
             "units": units,
             "bytes": {"state_on_files": 0, "publish_on_files": 32 << 20, "snapshots_on_files": 1 << 20,
                       "state": 48 << 20, "publish": 16 << 20, "inbox": 8 << 20, "board": 4096,
                       "ledger": 65536, "spill": 0, "spilled": 0},
             "rates": {"steps_per_s": 3.3, "returns_per_s": 106.0, "bytes_per_s": 4.2e7},
             "times_ms": {"collect": 200.0, "decide": 1.0, "apply": 12.0}, "leases": [],
             "checkpoint": None, "last_sum_norm": 1.5, "last_skipped": False,
             "loss": 2.5031, "grad_norm": 0.2652, "lr": 0.001,
             "metrics": [20.0]}
    return {"schema": 2, "version": "0.1.0", "device": device, "pid": 4000 + index,
            "uptime_s": 100 + t, "time_s": time.time(), "stale_ms": 9000.0 if mode == "stuck" else 3.0,
            "threads": 1, "isa": "cpu-avx512", "keeper": "notify",
            "kernels": [{"work": "adamw f32", "isa": "avx2", "ns": 0.31, "beside": "avx512",
                         "beside_ns": 0.34, "ratio": 0.91}],
            "adopted": {"models": 0, "at_s": 0, "ms": 0, "refused": [
                {"name": "old", "status": "SHD_ESPEC", "why": "its ledger is torn"}]
                if mode == "refused" else []},
            "requests": step * 10, "bad_frames": 0, "dropped_replies": 0, "repeated_replies": 0, "ring_bytes": 0,
            "models": [model], "sessions": workers, "waits": waits, "errors": []}


def poison(value, text):
    """Every string becomes text."""
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [poison(v, text) for v in value]
    if isinstance(value, dict):
        return {k: poison(v, text) for k, v in value.items()}
    return value


def twist(value, number):
    """Every number becomes another one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return number
    if isinstance(value, list):
        return [twist(v, number) for v in value]
    if isinstance(value, dict):
        return {k: twist(v, number) for k, v in value.items()}
    return value


def trace(device, index):
    """Two seconds: worker 12 computes half of the time it returns; both daemons tell of it."""
    events = [{"ph": "M", "name": "process_name", "pid": 12, "tid": 1, "args": {"name": "shd-gpt"}},
              {"ph": "M", "name": "process_name", "pid": 4000 + index, "tid": 1,
               "args": {"name": device}},
              {"ph": "X", "name": "forward", "pid": 12, "tid": 1, "ts": 1000.0, "dur": 1000.0},
              {"ph": "X", "name": "wait unit", "pid": 12, "tid": 1, "ts": 500.0, "dur": 500.0},
              {"ph": "X", "name": "apply", "pid": 4000 + index, "tid": 2, "ts": 500.0, "dur": 1000.0},
              {"ph": "s", "name": "return", "id": 7, "pid": 12, "tid": 1, "ts": 1500.0},
              {"ph": "f", "name": "return", "id": 7, "pid": 4000 + index, "tid": 2, "ts": 2500.0}]
    return json.dumps({"traceEvents": events}).encode()


def body_of(d, device, mode):
    doc = document(d, device, mode)
    if mode == "control":
        doc = poison(doc, "x\x1b]0;owned\x07\x1b[31mred\r\n\x9b2J\u202e\x7f\x00z")
    if mode == "types":
        doc = {"schema": 2, "device": [], "pid": "twelve", "uptime_s": {}, "stale_ms": "now",
               "kernels": [7, None, {"work": 5, "ratio": "x"}, {"work": "w" * 500, "ratio": 1e308}],
               "models": [1, None, "x", [], {"name": 7, "bytes": 3, "rates": [], "units": "many",
                                            "step": "ten", "metrics": {"a": 1}, "checkpoint": 5}],
               "sessions": [None, {"now": "never", "pid": []}, 3], "waits": [{"on": {"a": 1}},
               {"who": 9, "on": [1, None, "x"]}, 7], "errors": [5], "adopted": 3}
    if mode == "huge":
        doc = twist(doc, 8.9e307)
        doc["schema"], doc["stale_ms"] = 2, -5e300
    if mode == "list":
        doc = [doc]
    if mode == "nojson":
        return b"<html>no</html>"
    if mode == "deep":
        return b"[" * 1000000
    if mode == "big":
        doc["errors"] = [{"time_s": 1, "level": "warn", "text": "x" * 1000}] * 10000
    return json.dumps(doc).encode()


def answer(c, d, device, mode):
    request = b""
    while b"\r\n\r\n" not in request:
        more = c.recv(4096)
        if not more:
            return
        request += more
    target = request.split()[1].decode()
    if mode == "silent":
        time.sleep(3600)
    if mode == "junk":
        c.sendall(b"\x1b[2Jhello\r\n\r\n" + b"y" * 100)
        return
    if mode == "http404":
        c.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
        return
    if mode == "endless":
        c.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            c.sendall(b"[" * 65536)
    index = int("".join(x for x in device if x.isdigit()) or 0)
    body = trace(device, index) if target.startswith("/trace") else body_of(d, device, mode)
    if mode == "chunked":
        c.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(0, len(body), 100):
            part = body[i:i + 100]
            c.sendall(b"%X\r\n%s\r\n" % (len(part), part))
        c.sendall(b"0\r\n\r\n")
        time.sleep(5)  # and does not hang up
        return
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    if mode == "half":
        c.sendall(head + body[:len(body) // 2])
    elif mode == "trickle":
        for byte in head + body:
            c.sendall(bytes([byte]))
            time.sleep(1)
    else:
        c.sendall(head + body)


def serve_one(c, d, device, mode):
    with c:
        try:
            answer(c, d, device, mode)
        except OSError:
            pass


def serve(d, device, mode, ready):
    s = socket.socket(socket.AF_UNIX)
    s.bind(os.path.join(d, device + ".status"))
    s.listen(64)
    ready.release()
    while True:
        c, _ = s.accept()
        threading.Thread(target=serve_one, args=(c, d, device, mode), daemon=True).start()


def main():
    d = sys.argv[1]
    ready = threading.Semaphore(0)
    for word in sys.argv[2:]:
        device, mode = word.split("=")
        threading.Thread(target=serve, args=(d, device, mode, ready), daemon=True).start()
    for _ in sys.argv[2:]:
        ready.acquire()
    print("ready", flush=True)
    while True:
        time.sleep(3600)


main()
