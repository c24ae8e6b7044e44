"""A headless Chromium driven through its debugging pipe: no package but the standard library."""

import base64
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import zlib

# For what must come; less than ctest waits, so that it is said what did not.
HANG_S = min(120.0 * int(os.environ.get("SHD_TEST_PACE", "1")), 600)


def find():
    """Chromium's path, or None."""
    wanted = os.environ.get("CHROMIUM")
    names = [wanted] if wanted else ["chromium", "chromium-browser", "google-chrome"]
    return next((path for path in map(shutil.which, names) if path), None)


def packed(png):
    """The same picture with its data compressed as well as zlib can."""
    at, data, others = 8, b"", []
    while at < len(png):
        size, kind = struct.unpack_from(">I4s", png, at)
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        else:
            others.append((kind, png[at + 8 : at + 8 + size]))
        at += 12 + size
    chunks = others[:-1] + [(b"IDAT", zlib.compress(zlib.decompress(data), 9)), others[-1]]
    return png[:8] + b"".join(
        struct.pack(">I4s", len(body), kind) + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


class Ended(Exception):
    """There is no Chromium to ask any more."""


class Browser:
    """One page. events: what it reported since events were last cleared."""

    def __init__(self, path):
        self.profile = tempfile.mkdtemp(prefix="shd-page-")
        to_read, self.write_fd = os.pipe()
        self.read_fd, to_write = os.pipe()

        def place():
            os.dup2(to_read, 100)
            os.dup2(to_write, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        # As root, and in containers, Chromium's own sandbox cannot be set up.
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--force-color-profile=srgb",
            "--user-data-dir=" + self.profile,
            "about:blank",
        ]
        # pylint: disable=subprocess-popen-preexec-fn
        self.process = subprocess.Popen(
            [path, *flags],
            preexec_fn=place,
            close_fds=False,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.buffer, self.count, self.session, self.events = b"", 0, None, []
        self.attach()

    def attach(self):
        """To its page, which is there some time after Chromium answers."""
        end, pages = time.monotonic() + HANG_S, []
        while not pages:
            if time.monotonic() > end:
                raise RuntimeError(f"chromium has no page within {HANG_S:g} s")
            targets = self.call("Target.getTargets")["targetInfos"]
            pages = [t["targetId"] for t in targets if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

    def receive(self, timeout_s=HANG_S):
        """One message, or None."""
        end = time.monotonic() + timeout_s
        while b"\0" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.read_fd], [], [], left)[0]:
                return None
            chunk = os.read(self.read_fd, 1 << 20)
            if not chunk:
                raise Ended("chromium has ended")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.count += 1
        request = {"id": self.count, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write_fd, json.dumps(request).encode() + b"\0")
        while True:
            message = self.receive()
            if message is None:
                raise Ended(f"chromium does not answer {method}")
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def run(self, expression):
        """The value of a JavaScript expression (a promise's, when it is one)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, url, width=1280, height=900, dark=False, motion="reduce"):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                {"name": "prefers-reduced-motion", "value": motion},
            ],
        )
        self.call("Page.navigate", url="about:blank")  # what the page before asks for is not this one's
        self.wait("location.href === 'about:blank'")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href.startsWith(" + json.dumps(url) + ")")

    def holds(self, expression):
        """Whether it is true, and why not. What it speaks of may not be there yet: an exception is no."""
        try:
            return bool(self.run(expression)), ""
        except RuntimeError as e:
            return False, f" ({e})"

    def wait(self, expression, shown=None):
        """Until it is true. shown: an expression for what is seen instead."""
        end = time.monotonic() + HANG_S
        while True:
            held, why = self.holds(expression)
            if held:
                return
            if time.monotonic() > end:
                seen = f", shown is {self.run(shown)!r}" if shown else ""
                raise RuntimeError(f"not true within {HANG_S:g} s: {expression}{seen}{why}")
            time.sleep(0.05)

    def screenshot(self, path, selector=None, full=False):
        params = {"format": "png", "captureBeyondViewport": bool(selector or full)}
        if selector:
            box = self.run(
                f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                " return [r.x + scrollX, r.y + scrollY, r.width, r.height]; })()"
            )
            params["clip"] = {
                "x": max(0, box[0] - 12),
                "y": box[1] - 10,
                "width": box[2] + 24,
                "height": box[3] + 20,
                "scale": 1,
            }
        elif full:
            height = self.run("document.documentElement.scrollHeight")
            params["clip"] = {"x": 0, "y": 0, "width": self.run("innerWidth"), "height": height, "scale": 1}
        with open(path, "wb") as f:
            f.write(packed(base64.b64decode(self.call("Page.captureScreenshot", **params)["data"])))

    def named(self, method):
        """The events of that name, after those on their way have come."""
        self.run("0")
        return [e["params"] for e in self.events if e.get("method") == method]

    def close(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        os.close(self.read_fd)
        os.close(self.write_fd)
        shutil.rmtree(self.profile, ignore_errors=True)


# A real node for the page: daemons by `shardctl up`, a training in workers, `shardctl dashboard`.

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
        if not select.select([process.stdout], [], [], HANG_S)[0]:
            raise RuntimeError("the dashboard prints no address")
        url = process.stdout.readline().strip()
        if not re.fullmatch(r"http://127\.0\.0\.1:\d+/", url):
            raise RuntimeError(f"the dashboard printed '{url}'")
        return url

    def wait(self, ready, what):
        end = time.monotonic() + HANG_S
        while not ready():
            if time.monotonic() > end:
                raise RuntimeError(f"no {what} within {HANG_S:g} s")
            time.sleep(0.05)

    def __exit__(self, *_why):
        for process in self.workers:
            process.send_signal(signal.SIGCONT)
        for process in reversed(self.started):
            process.terminate()
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)
