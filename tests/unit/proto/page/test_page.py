#!/usr/bin/env python3
"""test_page.py BIN_DIR PAGE: the status page in a headless Chromium.

First with documents made here (page_fake.py): what is shown is what they say, also when they are
empty, huge, or tell of faults; then with real daemons in training behind `shardctl dashboard`.
Exits with 77 where there is no Chromium (package: chromium; $CHROMIUM names another).
"""

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import urllib.parse

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../lib"))
import page_browser
import page_fake

HERE = os.path.dirname(os.path.abspath(__file__))
WIDTHS = {"desktop": 1280, "phone": 360}
NARROW = "\u202f"
# The step's tile is drawn with the first answer: undefined before.
STEP = "document.querySelector('#tiles .big span')?.textContent"


def expect(what, got, wanted):
    if got != wanted:
        raise AssertionError(f"{what}: shown {got!r}, meant {wanted!r}")


def number(n):
    return f"{n:,}".replace(",", NARROW)


# -- What is shown -------------------------------------------------------------------------------


def cells(browser, table):
    """Rows of texts of a table's body."""
    return browser.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].map(tr => [...tr.cells].map(td => td.textContent))"
    )


def step_changes(browser):
    browser.wait("!!" + STEP)
    before = browser.run(STEP)
    browser.wait(STEP + " !== " + json.dumps(before))


# In the page: its questions, and the answer that it shows. An answer is shown in the turn in which it
# is read, so that what a timer does is after that.
WATCH = """window.watched = { asked: 0, done: 0, text: null };
window.fetch = ((ask) => async (...args) => {
  watched.asked++;
  const key = args[0] === "status" ? "text" : "units";
  try {
    const answer = await ask(...args), text = await answer.text();
    return { ok: answer.ok, status: answer.status, json: async () => JSON.parse(watched[key] = text) };
  } finally {
    setTimeout(() => watched.done++, 0);
  }
})(window.fetch);"""


def freeze(browser):
    """Pause, and the document that the page shows."""
    live, click = "document.getElementById('live-text').textContent", "document.getElementById('pause').click()"
    browser.run("window.watched ? 0 : (() => {" + WATCH + "})()")
    while True:
        browser.run("watched.text = null")
        browser.wait("watched.text !== null")
        browser.run(click)  # no question is asked from here on
        browser.wait("watched.done === watched.asked")
        browser.wait(f"/^(paused|unreachable)/.test({live})", live)
        if browser.run(live).startswith("paused"):
            return json.loads(browser.run("watched.text"))
        browser.run(click)  # the last one was not answered within its 8 s, and none is asked again


def daemons_of(document):
    return document.get("daemons", [document])


def check_norms(browser, models):
    """The map's last column is what the owners' units come to in its step."""
    rows = [row for row in cells(browser, "norms-table") if len(row) == 3]
    if not rows:
        return
    step = int(browser.run("document.getElementById('norms-table').dataset.step"))
    row = page_fake.units_answer({"daemons": [{"models": models}]}, {"from": [str(step)]})["rows"]
    shown = {r[0]: r[1] for r in rows}
    for i, unit in enumerate(models[0]["units"]):
        if not row or unit["frozen"] or unit["name"] not in shown:
            continue
        got, norm = shown[unit["name"]], row[0]["grad"][i]
        if norm is None:
            expect("norm of " + unit["name"], got, "not finite")
        elif abs(float(got) - norm) > 0.006 * norm:
            raise AssertionError(f"norm of {unit['name']}: shown {got!r}, meant {norm}")
    expect("units with a norm", len(rows), min(128, sum(not u["frozen"] for u in models[0]["units"])))


def check_values(browser, document, made=True):
    """Steps, gradients, versions, memory, workers and waits are those of the document."""
    daemons = [d for d in daemons_of(document) if "error" not in d]
    name = (
        browser.run("document.getElementById('model-select').value")
        or sorted(m["name"] for d in daemons for m in d["models"])[0]
    )
    owners = sorted(
        ((d, m) for d in daemons for m in d["models"] if m["name"] == name), key=lambda pair: pair[1]["owner"]
    )
    if made:
        check_norms(browser, [m for _, m in owners])
    rows = {row[0]: row for row in cells(browser, "daemons")}
    steps = {row[0]: row for row in cells(browser, "steps-table")}
    for d, m in owners:
        expect("step", rows[d["device"]][2], number(m["step"]))
        expect("phase", rows[d["device"]][3], m["phase"].lower())
        early = f", {m['waiting']} early" if m["waiting"] else ""
        expect(
            "gradients", steps[d["device"]][3], f"{number(m['returned'])} of {number(m['expected'])}{early}"
        )
    for i, row in enumerate(cells(browser, "map-table")):
        for column, (_d, m) in enumerate(owners):
            unit = m["units"][i]
            expect("unit", row[0], unit["name"])
            expect("version of " + unit["name"], row[1 + column].startswith(number(unit["version"])), True)
            gradients = "frozen" if unit["frozen"] else f"{unit['returned']}/{m['micro_batches']}"
            expect("gradients of " + unit["name"], row[1 + column].endswith(gradients), True)
    expect(
        "workers",
        {int(row[0]) for row in cells(browser, "workers-table")},
        {s["pid"] for d in daemons for s in d["sessions"]},
    )
    texts = browser.run("[...document.querySelectorAll('#waits-list .text')].map(n => n.textContent)")
    expect("waits", set(texts) <= {w["text"] for d in daemons for w in d["waits"]}, True)
    for d in daemons:
        total = sum(m["bytes"][kind] for m in d["models"] for kind in page_fake.KINDS)
        shown = next(row for row in cells(browser, "memory-table") if row[0] == d["device"])[8]
        value, unit = shown.split(NARROW)
        scale = 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)
        expect("memory within 1 %", abs(float(value) * scale - total) <= 0.01 * total, True)


def check_clean(browser, url):
    """No error, no request to another origin, nothing wider than the window, contrast, headers."""
    for event in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
        expect(event, browser.named(event), [])
    for request in browser.named("Network.requestWillBeSent"):
        target = request["request"]["url"]
        expect("request to " + target, target.startswith(("data:", urllib.parse.urljoin(url, "/"))), True)
    expect("too wide", browser.run("document.documentElement.scrollWidth > innerWidth"), False)
    with open(HERE + "/page_contrast.js", encoding="utf-8") as f:
        expect("contrast", browser.run(f.read()), [])
    expect("headers without scope", browser.run("document.querySelectorAll('th:not([scope])').length"), 0)
    expect("hover only", browser.run("document.querySelectorAll('[title]').length"), 0)


# -- With documents made here --------------------------------------------------------------------


def made_steps_go_on_when_hours_pass(_browser, _server):
    now = time.time()
    back = [s for s in range(10000) if page_fake.step_of(now + s + 1) != page_fake.step_of(now + s) + 1]
    expect("seconds from now whose step is not the next", back, [])


def every_scene_is_shown_cleanly_when_wide_narrow_light_and_dark(browser, server):
    for scene in page_fake.SCENES:
        url = server + scene + "/"
        for width in WIDTHS.values():
            for dark in (False, True):
                browser.events.clear()
                browser.open(url, width, 900, dark)
                browser.wait("document.querySelectorAll('#daemons tbody tr').length > 0")
                check_clean(browser, url)


def values_are_those_of_the_document_when_daemons_answer(browser, server):
    for scene in ("trains", "stopped", "large", "alone"):
        browser.open(server + scene + "/")
        check_values(browser, freeze(browser))


def names_stay_text_when_they_are_markup(browser, server):
    browser.open(server + "large/")
    browser.wait("document.querySelectorAll('#map-table tbody tr').length === 64")
    expect("elements from names", browser.run("document.querySelectorAll('img, #waits-list b').length"), 0)
    expect(
        "globals",
        browser.run("Object.keys(window).filter(k => ['state', 'poll', 'take', 'h'].includes(k))"),
        [],
    )


def step_changes_when_time_goes_on(browser, server):
    browser.open(server + "trains/")
    step_changes(browser)


def unit_has_its_name_when_a_worker_says_its_index(browser, server):
    browser.open(server + "alone/")
    browser.wait("document.querySelectorAll('#workers-table td.doing').length === 1")
    expect("does", cells(browser, "workers-table")[0][3].startswith("backward h.0, micro-batch 0"), True)


def stopped_worker_is_named_when_it_holds_up_a_step(browser, server):
    browser.open(server + "stopped/")
    browser.wait("document.getElementById('announce').textContent.includes('5201, stopped')")
    expect("first worker", cells(browser, "workers-table")[0][0:3], ["5201", "shd-gpt", "stopped"])
    expect(
        "row stands out", browser.run("document.querySelector('#workers-table tbody tr').className"), "alert"
    )
    expect("behind", cells(browser, "map-table")[2][3].startswith("1" + NARROW + "040\u22122"), True)


def faults_are_in_words_when_daemons_have_them(browser, server):
    browser.open(server + "faults/")
    browser.wait("document.querySelectorAll('#notices p').length === 4")
    words = browser.run("document.getElementById('notices').textContent")
    for wanted in (
        "EPROTO, ledger of layout 3",
        "unreachable since",
        "event loop has not turned for 7.4",
        "has failed: SHD_EIO",
    ):
        expect(wanted, wanted in words, True)


def page_says_since_when_and_comes_back_when_the_server_is_gone(browser, server, httpd):
    browser.open(server + "trains/")
    browser.wait("document.getElementById('live-text').textContent.startsWith('live')")
    httpd.broken = True
    browser.wait("document.getElementById('live-text').textContent.startsWith('unreachable since')")
    expect(
        "notice",
        browser.run("document.getElementById('notices').textContent").startswith("No answer since"),
        True,
    )
    expect("values stay", len(cells(browser, "daemons")), 2)
    httpd.broken = False
    browser.wait("document.getElementById('live-text').textContent.startsWith('live')")
    browser.wait("document.getElementById('notices').childElementCount === 0")


def keyboard_reaches_all_when_tab_is_pressed(browser, server):
    browser.open(server + "stopped/")
    browser.wait("document.querySelectorAll('#daemons tbody tr').length > 0")
    seen = []
    for _ in range(40):
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        seen.append(
            browser.run(
                "document.activeElement.id || document.activeElement.getAttribute('href') || document.activeElement.getAttribute('aria-label') || document.activeElement.tagName"
            )
        )
    for wanted in ("#overview", "pause", "theme", "#waits", "Shard map", "Workers", "SUMMARY"):
        expect("tab reaches " + wanted, wanted in seen, True)


def theme_is_kept_when_chosen(browser, server):
    browser.open(server + "trains/")
    theme = "document.documentElement.dataset.theme"
    browser.run("document.getElementById('theme').click(), document.getElementById('theme').click()")
    expect("theme", browser.run(theme), "dark")
    browser.open(server + "empty/")
    expect("theme of the next page", browser.run(theme), "dark")
    browser.run("document.getElementById('theme').click()")
    expect("auto again", browser.run(theme), "light")


# -- The heat map --------------------------------------------------------------------------------

AT = "document.getElementById('heat-at').textContent"


def number_in(text):
    return float(text.split(", skipped")[0].split()[-1])


def open_map(browser, server, scene, width=1280):
    browser.open(server + scene + "/", width)
    browser.wait("document.querySelectorAll('#norms-table svg').length > 0")
    freeze(browser)
    return int(browser.run("document.getElementById('norms-table').dataset.step"))


def point_at(browser, row, share):
    """The pointer over a unit's strip, this share of its width from the left."""
    box = browser.run(
        f"(() => {{ const s = document.querySelectorAll('#norms-table svg')[{row}]; "
        "s.scrollIntoView({ block: 'center', behavior: 'instant' }); const b = s.getBoundingClientRect(); "
        "return [b.left, b.top, b.width, b.height]; })()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + share * box[2],
                 y=box[1] + box[3] / 2)


def press(browser, *keys):
    for key in keys:
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def cell_is_read_when_it_is_pointed_at(browser, server):
    for width in WIDTHS.values():
        last = open_map(browser, server, "trains", width)
        point_at(browser, 3, 0.999)
        browser.wait(AT + ".startsWith('h.2, step ')", AT)
        norm = math.hypot(*(page_fake.unit_norm(d, 3, last) for d in range(2)))
        words = browser.run(AT)
        expect("step", f"step {number(last)}:" in words, True)
        expect("norm", abs(number_in(words) - norm) <= 0.006 * norm, True)
        point_at(browser, 0, 0.001)
        browser.wait(AT + f".includes('embed, step {number(last - 119)}:')", AT)
        expect("one cell is marked", browser.run(
            "[...document.querySelectorAll('.hat')].filter(p => p.getAttribute('d')).length"), 1)


def cells_are_read_when_keys_are_pressed(browser, server):
    last = open_map(browser, server, "trains")
    browser.run("document.getElementById('heat').focus()")
    press(browser, "ArrowLeft")  # the newest, of the first unit
    browser.wait(AT + f".startsWith('embed, step {number(last)}: gradient norm ')", AT)
    press(browser, "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowUp")
    browser.wait(AT + f".startsWith('h.0, step {number(last - 1)}: ')", AT)
    press(browser, "Home", "ArrowLeft")
    browser.wait(AT + f".startsWith('h.0, step {number(last - 119)}: ')", AT)
    press(browser, "End", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown")
    browser.wait(AT + f".startsWith('head, step {number(last)}: ')", AT)


def skipped_steps_and_cells_that_are_not_finite_stand_out_when_there_are_some(browser, server):
    last = open_map(browser, server, "trains")
    browser.run("document.getElementById('heat').focus()")
    press(browser, "ArrowLeft", "ArrowDown", "ArrowDown")
    back = (last - 9) % 16
    press(browser, *["ArrowLeft"] * back)
    words = f"h.1, step {number(last - back)}: gradient norm not finite, skipped: not finite"
    browser.wait(AT + " === " + json.dumps(words), AT)
    press(browser, *["ArrowLeft"] * 4)
    browser.wait(AT + ".endsWith(', skipped: norm_above')", AT)
    marked = "[...document.querySelectorAll('#norms-table .{}')].filter(p => p.getAttribute('d')).length"
    expect("units with a cell that is not finite", browser.run(marked.format("hbad")), 1)
    expect("units with a skipped step", browser.run(marked.format("hskip")), 6)


def ratios_are_shown_when_they_are_chosen(browser, server):
    open_map(browser, server, "trains")
    browser.run("document.getElementById('heat-ratio').click()")
    expect("pressed", browser.run("document.getElementById('heat-ratio').getAttribute('aria-pressed')"), "true")
    rows = cells(browser, "norms-table")
    expect("ratios", [float(row[1]) for row in rows], [1e-3, 1e-4, 1e-5, 1e-3, 1e-4, 1e-5])
    browser.run("document.getElementById('heat').focus()")
    press(browser, "End")
    browser.wait(AT + ".startsWith('embed, step ') && " + AT + ".endsWith(': update/weight 0.00100')", AT)
    step = int(browser.run("document.getElementById('norms-table').dataset.step"))
    expect("measured", step % page_fake.EVERY, 0)
    legend = browser.run("document.getElementById('heat-legend').textContent")
    for words in ("3.16e-4", "less", "not finite", "skipped step"):
        expect(words + " in the legend", words in legend, True)


def owner_says_that_it_shows_its_own_part_when_it_is_one_of_several(browser, server):
    lead = "document.getElementById('norms-lead').textContent"
    for scene, alone in (("alone", False), ("part", True), ("trains", False)):
        open_map(browser, server, scene)
        expect(scene, "This owner\u2019s slices alone" in browser.run(lead), alone)


def map_says_why_when_units_are_not_told(browser, server, httpd):
    lead = "document.getElementById('norms-lead').textContent"
    httpd.dumb = True
    try:
        browser.open(server + "trains/")
        browser.wait(lead + " === 'Not up to date: HTTP status 404.'", lead)
        expect("no row", cells(browser, "norms-table"), [["No step was seen to end yet."]])
        httpd.dumb = False
        browser.wait(lead + ".startsWith('Of each unit')", lead)
        httpd.dumb = True
        browser.wait(lead + ".endsWith(' Not up to date: HTTP status 404.')", lead)
        expect("rows stay", len(cells(browser, "norms-table")), 6)
        httpd.dumb = False
        browser.wait("!" + lead + ".includes('Not up to date')", lead)
    finally:
        httpd.dumb = False
    browser.open(server + "empty/")
    browser.wait("document.querySelectorAll('#daemons tbody tr').length > 0")
    expect("no model", cells(browser, "norms-table"), [["No step was seen to end yet."]])


# -- With real daemons ---------------------------------------------------------------------------


def check_real_units(browser):
    """What the dashboard's daemons add up to is what the map shows."""
    document = json.loads(browser.run("watched.units ?? 'null'"))
    step = int(browser.run("document.getElementById('norms-table').dataset.step"))
    row = next((r for r in (document or {"rows": []})["rows"] if r["step"] == step), None)
    if row is None:
        return
    shown = {r[0]: r[1] for r in cells(browser, "norms-table")}
    for name, norm in zip(document["units"], row["grad"]):
        expect("norm of " + name, abs(float(shown[name]) - norm) <= 0.006 * norm, True)


def real_training_is_shown_when_daemons_serve_it(browser, bin_dir):
    with page_browser.Node(bin_dir, daemons=2, workers=2) as node:
        browser.events.clear()
        browser.open(node.url)
        browser.wait(
            "document.querySelectorAll('#map-table .cell').length > 0 && document.querySelectorAll('#workers-table tbody tr').length >= 2"
        )
        step_changes(browser)
        check_clean(browser, node.url)
        check_values(browser, freeze(browser), made=False)
        check_real_units(browser)
        browser.run("document.getElementById('pause').click()")
        stopped = node.workers[1]
        stopped.send_signal(signal.SIGSTOP)
        words = "document.getElementById('headline').textContent"
        # Another wait may be the longest before.
        browser.wait(f"{words}.includes('(pid {stopped.pid}) is stopped: 1 worker waits ')", words)
        browser.wait(f"{words}.includes('kill -CONT {stopped.pid} ')", words)
        expect("tone", browser.run("document.getElementById('headline').className.includes('bad')"), True)
        expect("its row", cells(browser, "workers-table")[0][0], str(stopped.pid))
        stopped.send_signal(signal.SIGCONT)
        browser.wait(f"!{words}.includes('is stopped')", words)


def main():
    bin_dir, page = sys.argv[1:3]
    chromium = page_browser.find()
    if chromium is None:
        print("skipped: no Chromium here (Debian: apt-get install chromium)")
        return 77
    httpd = page_fake.serve(page)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    server = f"http://127.0.0.1:{httpd.server_port}/"
    fake = [f for n, f in list(globals().items()) if "_when_" in n and not n.startswith("real_")]
    failed = 0
    browser = page_browser.Browser(chromium)
    try:
        for test in fake:
            extra = [httpd] if test.__code__.co_argcount == 3 else []
            failed += not passes(test, browser, server, *extra)
        if page_browser.has_status(bin_dir):
            failed += not passes(real_training_is_shown_when_daemons_serve_it, browser, bin_dir)
        else:
            print("skip real_training: this build's daemons have no status sockets")
    finally:
        browser.close()
    return 1 if failed else 0


def passes(test, browser, *args):
    try:
        browser.events.clear()
        test(browser, *args)
        print("ok   " + test.__name__, flush=True)
        return True
    except (AssertionError, RuntimeError, LookupError, TypeError, ValueError, OSError):
        print("FAIL " + test.__name__, flush=True)
        traceback.print_exc()
        return False


if __name__ == "__main__":
    sys.exit(main())
