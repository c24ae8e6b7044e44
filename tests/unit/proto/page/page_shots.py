#!/usr/bin/env python3
"""page_shots.py BIN_DIR PAGE OUT_DIR [--made]: pictures of the status page for the documentation.

Of four daemons and four workers in training, one worker stopped after a while; --made: of
page_fake.py's documents. --all: every view, width and theme of every scene instead.
"""

import os
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../lib"))
import page_browser
import page_fake

BYTES_MAX = 200_000
VIEWS = ["overview", "map", "steps", "waits", "memory", "workers", "errors"]
SHOTS = [  # name, width, height, dark, section
    ("dashboard", 1280, 1000, False, None),
    ("dashboard-dark", 1280, 1000, True, None),
    ("dashboard-phone", 360, 760, False, None),
    ("dashboard-units", 1280, 1000, False, "steps"),
    ("dashboard-waits", 1280, 1000, False, "waits"),
]


def shoot(browser, url, out, shots, settle_s):
    for name, width, height, dark, section in shots:
        browser.open(url, width, height, dark)
        browser.wait("document.querySelectorAll('#daemons tbody tr').length > 0")
        time.sleep(settle_s)
        path = f"{out}/{name}.png"
        browser.screenshot(path, "#" + section if section else None)
        size = os.path.getsize(path)
        if size > BYTES_MAX:
            raise RuntimeError(f"{path} has {size} bytes, at most {BYTES_MAX} are meant")
        print(f"{path}: {size // 1024} KiB")


def made(browser, page, out, every):
    httpd = page_fake.serve(page)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    server = f"http://127.0.0.1:{httpd.server_port}/"
    if not every:
        return shoot(browser, server + "stopped/", out, SHOTS, 8)
    for scene in page_fake.SCENES:
        shots = [
            (f"{scene}-{view}-{width}-{'dark' if dark else 'light'}", width, 900, dark, view)
            for view in VIEWS
            for width in (1280, 360)
            for dark in (False, True)
        ]
        shoot(browser, f"{server}{scene}/", out, shots, 0.3)
    return None


def real(browser, bin_dir, out):
    with page_browser.Node(bin_dir, daemons=4, workers=4) as node:
        browser.open(node.url)
        browser.wait("document.querySelectorAll('#workers-table tbody tr').length >= 4")
        shoot(browser, node.url, out, SHOTS[:4], 20)
        node.workers[1].send_signal(signal.SIGSTOP)
        browser.wait("document.getElementById('headline').className.includes('bad')")
        shoot(browser, node.url, out, SHOTS[4:], 5)


def main():
    bin_dir, page, out = sys.argv[1:4]
    options = sys.argv[4:]
    chromium = page_browser.find()
    if chromium is None:
        print("page_shots.py: no Chromium here (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    browser = page_browser.Browser(chromium)
    try:
        if page_browser.has_status(bin_dir) and not options:
            real(browser, bin_dir, out)
        else:
            made(browser, page, out, "--all" in options)
    finally:
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
