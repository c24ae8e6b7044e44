#!/usr/bin/env python3
"""test_page_dashboard.py BIN_DIR: `shardctl dashboard` over HTTP, before daemons made here.

The daemons are status sockets in a directory that serve page_fake.py's documents, or do worse.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../lib"))
import page_fake

HANG_S = 120 * int(os.environ.get("SHD_TEST_PACE", "1"))  # for what must come


def expect(what, got, wanted):
    if got != wanted:
        raise AssertionError(f"{what}: {got!r}, meant {wanted!r}")


class StatusServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class StatusHandler(socketserver.StreamRequestHandler):
    def handle(self):
        while self.rfile.readline().strip():
            pass
        if self.server.manner == "slow":
            time.sleep(2 * HANG_S)
        body = self.server.body().encode()
        answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with contextlib.suppress(OSError):  # who asked may have gone
            self.wfile.write(answer)


class Fixture:
    """A directory with daemons' sockets and a dashboard that looks at it."""

    def __init__(self, bin_dir):
        self.shardctl = bin_dir + "/shardctl"
        self.dir = tempfile.mkdtemp(prefix="dash-")
        self.servers, self.process, self.port = {}, None, 0

    def daemon(self, device, manner="well"):
        server = StatusServer(f"{self.dir}/{device}.status", StatusHandler)
        server.manner = manner
        number = int(device.removeprefix("cpu"))
        server.body = lambda: (
            "no JSON"
            if manner == "garbage"
            else json.dumps(page_fake.stopped(time.time())["daemons"][number])
        )
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self.servers[device] = server

    def end_daemon(self, device):
        server = self.servers.pop(device)
        server.shutdown()
        server.server_close()

    def start(self, *flags):
        command = [
            self.shardctl,
            "dashboard",
            "--runtime-dir",
            self.dir,
            *(flags or ("--listen", "127.0.0.1:0")),
        ]
        wait = {"SHARDD_STATUS_TIMEOUT_MS": str(25 * HANG_S)}  # for one that is slow, not silent
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | wait
        )
        line = self.process.stdout.readline().strip()
        if line.startswith("http://"):
            self.port = int(line.rstrip("/").rsplit(":", 1)[1])
        return line

    def fails(self, *flags):
        """Its exit code and words, where it is meant to end at once."""
        done = subprocess.run(
            [self.shardctl, "dashboard", "--runtime-dir", self.dir, *flags],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        return done.returncode, done.stderr

    def get(self, path, method="GET", headers=None, timeout=HANG_S):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        result = answer.status, answer.read(), answer.headers
        connection.close()
        return result

    def daemons(self):
        code, body, _headers = self.get("/status")
        expect("code", code, 200)
        document = json.loads(body)
        expect("schema", document["schema"], 2)
        return {d["device"]: d for d in document["daemons"]}

    def shows(self, what, so):
        """Until so(daemons) is true: an answer may be of a moment ago."""
        end = time.monotonic() + HANG_S
        while not so(daemons := self.daemons()):
            if time.monotonic() > end:
                raise AssertionError(f"{what}: never shown, but {daemons!r}")
            time.sleep(0.05)

    def stop(self, number=signal.SIGINT):
        self.process.send_signal(number)
        code = self.process.wait(HANG_S)
        expect("stderr", self.process.stderr.read(), "")
        self.process = None
        return code

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for device in list(self.servers):
            self.end_daemon(device)
        shutil.rmtree(self.dir, ignore_errors=True)


def all_daemons_are_in_one_document_when_they_answer(f):
    for device in ("cpu0", "cpu1", "cpu2"):
        f.daemon(device)
    f.start()
    daemons = f.daemons()
    expect("devices in order", list(daemons), ["cpu0", "cpu1", "cpu2"])
    expect("document as sent", daemons["cpu2"]["models"][0]["units"][1]["version"], 1041)
    expect("exit code", f.stop(), 0)


def daemon_is_named_with_its_error_when_it_fails(f):
    f.daemon("cpu0")
    f.daemon("cpu1", "garbage")
    f.daemon("cpu2", "slow")
    f.start()
    daemons = f.daemons()  # or it is given up
    expect("well", "error" in daemons["cpu0"], False)
    expect("garbage", set(daemons["cpu1"]), {"device", "error"})
    expect("slow", set(daemons["cpu2"]), {"device", "error"})


def daemons_come_and_go_when_it_runs(f):
    f.daemon("cpu0")
    f.start()
    expect("one", list(f.daemons()), ["cpu0"])
    f.daemon("cpu1")
    f.shows("two", lambda daemons: list(daemons) == ["cpu0", "cpu1"])
    f.end_daemon("cpu0")
    f.shows("gone", lambda daemons: "error" in daemons["cpu0"])
    os.unlink(f"{f.dir}/cpu0.status")
    f.daemon("cpu0")
    f.shows("back", lambda daemons: "error" not in daemons["cpu0"])


def page_is_one_file_with_a_policy_when_asked(f):
    f.daemon("cpu0")
    f.start()
    code, body, headers = f.get("/")
    expect("code", code, 200)
    expect("a page", body.startswith(b"<!doctype html>") and body.rstrip().endswith(b"</html>"), True)
    expect("small", len(body) <= 73728, True)
    expect("type", headers["Content-Type"], "text/html; charset=utf-8")
    expect(
        "policy",
        "default-src 'none'" in headers["Content-Security-Policy"]
        and "frame-ancestors 'none'" in headers["Content-Security-Policy"],
        True,
    )
    expect("head", f.get("/", "HEAD")[0:2], (200, b""))
    expect("health", f.get("/healthz")[0], 200)


def request_is_refused_when_it_is_none_of_ours(f):
    f.daemon("cpu0")
    f.start()
    expect("unknown path", f.get("/etc/passwd")[0], 404)
    expect("post", f.get("/status", "POST")[0], 405)
    for host in ("evil.example", "127.evil.example:8440", "127.0.0.1.evil.example", "[::2]:8440", ""):
        expect("host " + host, f.get("/status", headers={"Host": host})[0], 403)
    for host in ("localhost", f"localhost:{f.port}", "127.0.0.1", "127.9.9.9:1", "[::1]:8440"):
        expect("host " + host, f.get("/status", headers={"Host": host})[0], 200)
    expect("huge header", f.get("/", headers={"X": "y" * 40000})[0] in (413, 431), True)


def others_are_served_when_clients_are_slow_or_many(f):
    f.daemon("cpu0")
    f.start()
    slow = []
    for _ in range(40):
        slow.append(socket.create_connection(("127.0.0.1", f.port), timeout=HANG_S))
        slow[-1].sendall(b"GET /status HTTP/1.1\r\nHost: loc")
    expect("while 40 are slow", f.get("/status")[0], 200)
    for _ in range(100):
        slow.append(socket.create_connection(("127.0.0.1", f.port), timeout=HANG_S))
    for s in slow:
        s.close()
    expect("after 140", f.get("/status")[0], 200)
    expect("exit code", f.stop(signal.SIGTERM), 0)


def place_is_refused_when_others_could_reach_it(f):
    f.daemon("cpu0")
    for where in ("0.0.0.0:0", "[::]:0", "192.0.2.1:8440"):
        code, words = f.fails("--listen", where)
        expect("code", code, 1)
        expect("why", "no password" in words and "--allow-remote" in words, True)
    f.start("--listen", "0.0.0.0:0", "--allow-remote")
    expect("any host", f.get("/status", headers={"Host": "node7:8440"})[0], 200)


def words_say_what_is_wrong_when_it_cannot_start(f):
    expect("no daemon", f.fails()[0], 1)
    f.daemon("cpu0")
    for where in ("8440", "localhost:", ":8440", "host.name:80", "[::1:80", "127.0.0.1:x"):
        code, words = f.fails("--listen", where)
        expect(where, (code, where in words), (1, True))
    f.start()
    code, words = f.fails("--listen", f"127.0.0.1:{f.port}")
    expect("taken", (code, "in use" in words), (1, True))
    expect("both", f.fails("--socket", "x", "--listen", "y:1")[0], 2)


def socket_is_private_and_removed_when_it_is_a_path(f):
    f.daemon("cpu0")
    path = f.dir + "/page"
    expect("what it prints", f.start("--socket", path), path)
    expect("mode", stat.S_IMODE(os.stat(path).st_mode), 0o600)
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    s.sendall(b"GET /status HTTP/1.0\r\nHost: localhost\r\n\r\n")
    expect("answer", b" 200 " in s.recv(100), True)
    s.close()
    code, words = f.fails("--socket", path)
    expect("live one", (code, "already" in words), (1, True))
    f.process.kill()
    f.process.wait()
    expect("left behind", os.path.exists(path), True)
    f.start("--socket", path)
    expect("exit code", f.stop(), 0)
    expect("removed", os.path.exists(path), False)


def main():
    failed = 0
    for name, test in [(n, t) for n, t in list(globals().items()) if "_when_" in n]:
        fixture = Fixture(sys.argv[1])
        try:
            test(fixture)
            print("ok   " + name, flush=True)
        except (
            AssertionError,
            OSError,
            KeyError,
            ValueError,
            http.client.HTTPException,
            subprocess.TimeoutExpired,
        ):
            failed += 1
            print("FAIL " + name, flush=True)
            traceback.print_exc()
        finally:
            fixture.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
