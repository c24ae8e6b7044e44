"""test_metrics.py BINDIR: what daemons count, as its readers see it.

A real training with two daemons and two workers; then: promtool finds nothing wrong with /metrics,
every family of docs/status.md is there and has a panel in docs/grafana/shardd.json, counters agree
with the steps taken, and /trace shows computing, fetching and returning at the same time. `shardctl
exporter` has both daemons, and none of what stands beside them: sockets that are dead, hang or lie.
A real Prometheus scrapes it by docs/prometheus, and says so when a worker is stopped; promtool tests
the alerts. Exit 77 where promtool is missing (Debian: prometheus), after the rest.
"""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bench"))
from groups import free_port  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
DOCS = os.path.join(HERE, "../../docs")
STEPS = 40
HANG_S = 300 * int(os.environ.get("SHD_TEST_PACE", "1"))  # what must come is waited for


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=HANG_S) as r:
        return r.read().decode()


def wait_for(what, check):
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        try:
            got = check()
            if got:
                return got
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {HANG_S} s")


class Run:
    """Daemons that listen on loopback ports, and workers; all end with it."""

    def __init__(self, bin_dir, directory):
        self.bin, self.dir, self.processes = bin_dir, directory, []
        self.ports = [free_port() for _ in range(2)]

    def start(self, *command, env=None):
        log = open(os.path.join(self.dir, "log"), "ab")
        p = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})})
        log.close()
        self.processes.append(p)
        return p

    def start_daemons(self):
        for i, port in enumerate(self.ports):
            self.start(os.path.join(self.bin, "shardd"), "--device", f"cpu{i}", "--runtime-dir",
                       os.path.join(self.dir, "run"), "--threads", "1",
                       "--status-address", f"127.0.0.1:{port}")
            wait_for("daemon", lambda port=port: get(port, "/healthz"))

    def start_exporter(self):
        port = free_port()
        self.start(os.path.join(self.bin, "shardctl"), "exporter", "--address",
                   os.path.join(self.dir, "run"), "--listen", f"127.0.0.1:{port}")
        wait_for("exporter", lambda: get(port, "/healthz"))
        return port

    def start_workers(self, steps):
        return [self.start(os.path.join(self.bin, "shd-gpt"), "--address",
                           os.path.join(self.dir, "run"), "--steps", str(steps), "--threads", "1",
                           "--dim", "64", "--seq", "64", "--batch", "4", "--sample", "0", "--eval-windows", "0",
                           env={"RANK": str(r), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
                for r in range(2)]

    def end(self):
        for p in reversed(self.processes):
            p.terminate()
        for p in self.processes:
            try:
                p.wait(HANG_S)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()


def parse(text):
    """{name: {labels: value}} of Prometheus text."""
    families = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        m = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        assert m, f"not a sample: {line}"
        families.setdefault(m[1], {})[m[2]] = float(m[3])
    return families


def documented():
    with open(os.path.join(DOCS, "status.md"), encoding="utf-8") as f:
        text = f.read()
    section = text[text.index("## /metrics"):text.index("## /trace")]
    return sorted(set(re.findall(r"`(shardd_[a-z_]+?)(?:\{[^`]*\})?`", section)) - {"shardd_"})


def check_metrics(port):
    text = get(port, "/metrics")
    families = parse(text)
    typed = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    assert sorted(typed) == documented(), (sorted(typed), documented())
    with open(os.path.join(DOCS, "grafana/shardd.json"), encoding="utf-8") as f:
        dashboard = f.read()
    json.loads(dashboard)
    for name in typed:
        assert name in dashboard, f"{name} has no panel: run docs/grafana/generate.py"
    label = 'device="cpu0",model="gpt"'
    assert families["shardd_steps_total"][label] == STEPS, families["shardd_steps_total"]
    assert families["shardd_step"][label] == STEPS
    assert families["shardd_returns_total"][label] == STEPS * 6 * 4  # units, micro-batches
    assert families["shardd_return_seconds_count"][label] == STEPS * 6 * 4
    assert families["shardd_collect_seconds_count"][label] == STEPS
    assert families["shardd_fetch_wait_seconds_count"][label] > STEPS
    assert families["shardd_sessions_total"]['device="cpu0"'] == 2
    assert families["shardd_session_deaths_total"]['device="cpu0"'] == 0
    for name, kind in typed.items():
        if kind == "histogram":
            buckets = [v for k, v in families[f"{name}_bucket"].items()]
            assert buckets == sorted(buckets) and len(buckets) == 21, name
    return text


def check_trace(port, directory):
    path = os.path.join(directory, "trace.json")
    with open(path, "w", encoding="utf-8") as f:
        f.write(get(port, "/trace?seconds=60"))
    subprocess.run([sys.executable, os.path.join(HERE, "trace_check.py"), path, "--overlap"], check=True)


class Fakes:
    """Sockets beside the daemons': of one that is dead, one that never answers, one that lies."""

    def __init__(self, directory):
        self.paths = [os.path.join(directory, f"{name}.status") for name in ("dead", "hangs", "lies")]
        self.sockets = [socket.socket(socket.AF_UNIX) for _ in self.paths]
        for s, path in zip(self.sockets, self.paths):
            s.bind(path)
        for s in self.sockets[1:]:
            s.listen(8)
        threading.Thread(target=self.lie, daemon=True).start()

    def lie(self):
        page = ("# HELP shardd_up Whether the daemon answers.\n# TYPE shardd_up gauge\n"
                'shardd_up{device="cpu0"} 0\n')
        try:
            while True:
                with self.sockets[2].accept()[0] as c:
                    c.recv(4096)
                    c.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\n\r\n{page}".encode())
        except OSError:
            pass

    def end(self):
        for s, path in zip(self.sockets, self.paths):
            s.close()
            os.remove(path)


def check_exporter(run, port):
    fakes = Fakes(os.path.join(run.dir, "run"))
    text = get(port, "/metrics")
    families = parse(text)
    up = {labels.split('"')[1]: value for labels, value in families["shardd_up"].items()}
    assert up == {"cpu0": 1, "cpu1": 1, "dead": 0, "hangs": 0, "lies": 0}, up
    for i, daemon in enumerate(run.ports):
        for name, samples in parse(get(daemon, "/metrics")).items():
            missing = set(samples) - set(families[name])
            assert not missing, f"cpu{i}: {name} has not {missing}"
    assert len(re.findall("^# TYPE shardd_step gauge$", text, re.M)) == 1
    fakes.end()
    # What took its sockets along is not missed.
    wait_for("two daemons", lambda: len(parse(get(port, "/metrics"))["shardd_up"]) == 2)
    return text


def check_stall(run, port):
    """A stopped worker is an alert, which ends with the stall."""

    def alerts():
        found = json.loads(get(port, "/api/v1/alerts"))["data"]["alerts"]
        return {(a["labels"]["alertname"], a["labels"]["model"]) for a in found
                if a["state"] == "firing" and "model" in a["labels"]}

    workers = run.start_workers(STEPS + 1000000)
    wait_for("steps again", lambda: parse(get(run.ports[0], "/metrics"))["shardd_step"][
        'device="cpu0",model="gpt"'] > STEPS + 5)
    workers[1].send_signal(signal.SIGSTOP)
    try:
        wait_for("alert of a stopped worker", lambda: ("ShardStalled", "gpt") in alerts())
    finally:
        workers[1].send_signal(signal.SIGCONT)
    wait_for("the alert's end", lambda: ("ShardStalled", "gpt") not in alerts())
    for w in workers:
        w.terminate()
        w.wait(HANG_S)


def check_prometheus(run, exporter, directory):
    """By the configuration and the rules of docs/prometheus, in less time."""
    port = free_port()
    config = os.path.join(directory, "prometheus.yml")
    with open(f"{DOCS}/prometheus/scrape.yml", encoding="utf-8") as f:
        scrape = f.read().replace("5s", "1s").replace("127.0.0.1:9464", f"127.0.0.1:{exporter}")
    with open(config, "w", encoding="utf-8") as f:
        f.write(scrape)
    with open(f"{DOCS}/prometheus/alerts.yml", encoding="utf-8") as f:
        rules = f.read().replace("interval: 5s", "interval: 1s").replace("_seconds > 30", "_seconds > 5")
    with open(os.path.join(directory, "alerts.yml"), "w", encoding="utf-8") as f:
        f.write(rules)
    run.start("prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}",
              f"--storage.tsdb.path={directory}/tsdb")
    query = urllib.parse.urlencode({"query": "shardd_step"})

    def steps():
        result = json.loads(get(port, f"/api/v1/query?{query}"))["data"]["result"]
        return result if len(result) == 2 else None

    result = wait_for("shardd_step in Prometheus", steps)
    assert all(float(r["value"][1]) == STEPS for r in result), result
    check_stall(run, port)


def main():
    base = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
    directory = tempfile.mkdtemp(prefix="shd-metrics-", dir=base)
    run = Run(sys.argv[1], directory)
    tools = shutil.which("promtool") and shutil.which("prometheus")
    try:
        run.start_daemons()
        workers = run.start_workers(STEPS)
        wait_for("first steps", lambda: '"updates":0' not in get(run.ports[0], "/status")
                 and '"model' in get(run.ports[0], "/status"))
        wait_for("20 steps", lambda: parse(get(run.ports[0], "/metrics")).get(
            "shardd_step", {}).get('device="cpu0",model="gpt"', 0) >= 20)
        check_trace(run.ports[0], directory)
        for w in workers:
            assert w.wait(HANG_S) == 0
        wait_for("sessions to end",
                 lambda: parse(get(run.ports[0], "/metrics"))["shardd_sessions"]['device="cpu0"'] == 0)
        text = check_metrics(run.ports[0])
        exporter = run.start_exporter()
        merged = check_exporter(run, exporter)
        print("metrics agree with the steps taken, and the exporter's with the daemons'")
        if not tools:
            print("promtool and prometheus are not installed: their part is skipped")
            return 77
        for page in (text, merged):
            subprocess.run(["promtool", "check", "metrics"], input=page.encode(), check=True)
        subprocess.run(["promtool", "check", "rules", f"{DOCS}/prometheus/alerts.yml"], check=True)
        subprocess.run(["promtool", "check", "config", "--syntax-only", f"{DOCS}/prometheus/scrape.yml"],
                       check=True)
        subprocess.run(["promtool", "test", "rules", f"{HERE}/alerts_test.yml"], check=True)
        check_prometheus(run, exporter, directory)
        print("Prometheus has shardd_step of both daemons, and an alert while a worker was stopped")
        return 0
    finally:
        run.end()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
