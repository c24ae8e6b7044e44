#!/usr/bin/env python3
"""What two daemons of systemd show while they train, as a member of their group reads it with curl.

  package_watch.py attached PID PID   both daemons have these sessions and train
  package_watch.py stop PID           SIGSTOP: /status names it within a second; SIGCONT; prints how long
  package_watch.py hold PID           SIGSTOP, until it is named; it stays stopped
  package_watch.py adopted DEVICE     it has adopted the model, and training goes on
  package_watch.py draining           both daemons say that they are

Every wait has an end and says what it was for. Used by test_package.sh, in its box."""
import json
import os
import signal
import subprocess
import sys
import time

DEVICES = ("cpu0", "cpu1")
NAMED_S = 1.0  # promised of a machine with a CPU to spare: the best of TRIES
TRIES = 4
PACE = int(os.environ.get("SHD_TEST_PACE", "1"))
WAIT_S = 120.0 * PACE


def ask(device, path):
    """(HTTP status, body); 0 when there was no answer."""
    command = ["curl", "-sS", "-m", str(5 * PACE), "-w", "\n%{http_code}", "--unix-socket",
               f"/run/shardd/{device}.status", "http://x" + path]
    text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    body, _, code = text.stdout.rpartition("\n")
    return int(code or 0), body


def status(device):
    code, body = ask(device, "/status")
    return json.loads(body) if code == 200 else {}


def until(what, look, limit_s=WAIT_S):
    begin = time.monotonic()
    while not look():
        if time.monotonic() - begin > limit_s:
            sys.exit(f"not within {limit_s:g} s: {what}: "
                     + json.dumps({d: status(d) for d in DEVICES}))
        time.sleep(0.02)
    return time.monotonic() - begin


def steps():
    models = [status(d).get("models", []) for d in DEVICES]
    return [m[0]["step"] if m else 0 for m in models]


def train(count=5):
    before = steps()
    until(f"{count} steps after {before}",
          lambda: all(now >= b + count for now, b in zip(steps(), before)))


def attached(pids):
    until(f"sessions of {pids}",
          lambda: all({s["pid"] for s in status(d).get("sessions", [])} == pids for d in DEVICES))
    train()
    for device in DEVICES:
        document = status(device)
        assert document["device"] == device and document["keeper"] == "notify", document
        states = {s["state"] for s in document["sessions"]}
        assert states <= {"running", "sleeping"}, states
        until(f"{device} is well", lambda device=device: ask(device, "/healthz")[0] == 200)
        code, metrics = ask(device, "/metrics")
        assert code == 200 and "\nshardd_step{" in metrics, metrics


def is_named(pid):
    """Some daemon says of a wait that it is for this process, which is stopped."""
    for device in DEVICES:
        for wait in status(device).get("waits", []):
            if any(on["pid"] == pid and on["state"] == "stopped" for on in wait["on"]):
                assert f"pid {pid}, stopped" in wait["text"], wait
                return True
    return False


def hold(pid):
    os.kill(pid, signal.SIGSTOP)
    return until(f"the stopped worker, pid {pid}, is named", lambda: is_named(pid))


def stop(pid):
    took = []
    while not took or (min(took) > PACE * NAMED_S and len(took) < TRIES):
        try:
            took.append(hold(pid))
        finally:
            os.kill(pid, signal.SIGCONT)
        until("nobody is stopped", lambda: not is_named(pid))
        train()
    assert min(took) <= PACE * NAMED_S, took
    print("%.2f" % min(took))


def adopted(device):
    until(f"{device} has adopted", lambda: status(device).get("adopted", {}).get("models") == 1)
    assert status(device)["models"][0]["adopted"], status(device)
    train()


def draining():
    until("draining", lambda: all(status(d).get("draining") for d in DEVICES))


def main():
    verb, arguments = sys.argv[1], sys.argv[2:]
    if verb == "attached":
        attached({int(pid) for pid in arguments})
    elif verb == "stop":
        stop(int(arguments[0]))
    elif verb == "hold":
        hold(int(arguments[0]))
    elif verb == "adopted":
        adopted(arguments[0])
    else:
        draining()


main()
