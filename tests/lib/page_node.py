"""A real node for the page: daemons by `shardctl up`, a training in workers, `shardctl dashboard`."""

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time

import page_browser


def has_status(bin_dir):
    """Whether this build's daemons have status sockets."""
    text = subprocess.run([bin_dir + "/shardd", "--help"], capture_output=True, text=True, check=False).stdout
    return "--status-address" in text


class Node:
    """with Node(...) as node: node.url is the dashboard's."""

    def __init__(self, bin_dir, daemons, workers):
        self.bin, self.daemons, self.worker_count = bin_dir, daemons, workers
        home = os.environ.get("XDG_RUNTIME_DIR") or os.path.expanduser("~")  # never where all can write
        self.dir = tempfile.mkdtemp(prefix="page-", dir=home)
        self.started, self.workers, self.url = [], [], ""

    def start(self, *command, **options):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        self.started.append(process)
        return process

    def __enter__(self):
        try:
            up = [self.bin + "/shardctl", "up", "--runtime-dir", self.dir, "--daemons", str(self.daemons)]
            self.start(*up, "--foreground", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.wait(
                lambda: sum(f.endswith(".status") for f in os.listdir(self.dir)) == self.daemons,
                "status sockets",
            )
            for rank in range(self.worker_count):
                env = {
                    **os.environ,
                    "SHARDD_ADDRESS": self.dir,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.worker_count),
                    "LOCAL_RANK": str(rank),
                }
                self.workers.append(
                    self.start(
                        self.bin + "/shd-gpt",
                        "--steps",
                        "100000",
                        env=env,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
            self.url = self.dashboard()
        except BaseException:
            self.__exit__()
            raise
        return self

    def dashboard(self):
        process = self.start(
            self.bin + "/shardctl",
            "dashboard",
            "--runtime-dir",
            self.dir,
            "--listen",
            "127.0.0.1:0",
            stdout=subprocess.PIPE,
            text=True,
        )
        if not select.select([process.stdout], [], [], page_browser.HANG_S)[0]:
            raise RuntimeError("the dashboard prints no address")
        url = process.stdout.readline().strip()
        if not re.fullmatch(r"http://127\.0\.0\.1:\d+/", url):
            raise RuntimeError(f"the dashboard printed '{url}'")
        return url

    def wait(self, ready, what):
        end = time.monotonic() + page_browser.HANG_S
        while not ready():
            if time.monotonic() > end:
                raise RuntimeError(f"no {what} within {page_browser.HANG_S:g} s")
            time.sleep(0.05)

    def __exit__(self, *_why):
        for process in self.workers:
            process.send_signal(signal.SIGCONT)
        for process in reversed(self.started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)
