# SPDX-License-Identifier: Apache-2.0
"""The built site in a real browser: Debian's packages chromium and chromium-driver."""

import functools
import http.server
import json
import shutil
import threading

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

DESKTOP, PHONE = (1400, 900), (390, 844)
# The flags without which Chromium looks for hosts of its own.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Seconds: what a page of this site never needs, on a loaded machine either.
PATIENCE = 120


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def serve():
    """Serves a folder on this machine; the value is its address."""
    servers = []

    def started(folder):
        handler = functools.partial(Quiet, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield started
    for server in servers:
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium, with its log of requests and of the console."""
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    assert all(programs), "needs Debian's packages chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    yield driver
    driver.quit()


def visit(browser, address, page, size):
    """Open a page at a size of window, and tell what is wrong with it."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(f"{address}/{page}")
    WebDriverWait(browser, PATIENCE).until(
        lambda b: b.execute_script(
            "return document.readyState == 'complete'"
            " && [...document.images].every(image => image.complete)"
        )
    )
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    faults = [f"outside request: {u}" for u in requests if not u.startswith((address, "data:"))]
    faults += [
        f"console: {entry['message']}"
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE"
    ]
    # What is folded must fit too once somebody opens it.
    browser.execute_script("document.querySelectorAll('article details').forEach(d => d.open = 1)")
    scroll, inner = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    faults += [f"scrolls: {scroll} > {inner}"] if scroll > inner else []
    broken = browser.execute_script(
        "return [...document.querySelectorAll('article img')]"
        ".filter(image => image.naturalWidth == 0 || image.clientWidth < 100).map(i => i.src)"
    )
    faults += [f"not visible: {source}" for source in broken]
    assert requests
    return faults


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_of_the_site_load_without_a_fault(browser, serve, built, size):
    address = serve(built)
    pages = [p.relative_to(built).as_posix() for p in sorted(built.rglob("*.html"))]
    assert len(pages) > 20
    faults = {page: visit(browser, address, page, size) for page in pages if page != "404.html"}
    assert {page: found for page, found in faults.items() if found} == {}


def test_operator_page_with_records_shows_its_plots(browser, serve, built):
    assert visit(browser, serve(built), "operators/rms_norm_gated.html", DESKTOP) == []
    images = browser.find_elements(By.CSS_SELECTOR, "article img.plot")
    assert len(images) >= 2
    assert all(image.is_displayed() and image.size["width"] > 300 for image in images)


def test_full_tables_of_an_operator_open_on_a_click(browser, serve, built):
    browser.get(f"{serve(built)}/operators/rms_norm.html")
    (folded, *_) = browser.find_elements(By.CSS_SELECTOR, "article details")
    (shown, *_) = folded.find_elements(By.CSS_SELECTOR, "table")
    assert not shown.is_displayed()
    folded.find_element(By.CSS_SELECTOR, "summary").click()
    assert shown.is_displayed()


def test_plots_of_the_site_hold_no_markup_of_formulas(built):
    drawn = sorted(built.rglob("*.svg"))
    assert len(drawn) > 20
    assert [path.name for path in drawn if "mathdefault" in path.read_text()] == []


def test_search_of_the_site_finds_a_word_of_a_page(browser, serve, built):
    assert visit(browser, serve(built), "index.html", DESKTOP) == []
    field = browser.find_element(By.CSS_SELECTOR, "input[data-md-component=search-query]")
    field.click()
    field.send_keys("chunk-256")
    # In one script: the theme draws the results anew with every key.
    results = (
        "return [...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"
        ".filter(href => href.includes('row-sum'))"
    )
    WebDriverWait(browser, PATIENCE).until(lambda b: b.execute_script(results))


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<img src='http://192.0.2.1/a.png'>", "outside request: http://192.0.2.1/a.png"),
        ("<script>console.error('broken')</script>", "console: "),
        ("<div style='width: 900px'>wide</div>", "scrolls: "),
        ("<details><div style='width: 900px'>wide</div></details>", "scrolls: "),
        ("<img src='absent.svg'>", "not visible: "),
    ],
)
def test_check_of_a_page_with_a_planted_fault_finds_it(browser, serve, tmp_path, body, fault):
    head = "<meta name=viewport content='width=device-width'><link rel=icon href='data:,'>"
    (tmp_path / "page.html").write_text(f"<head>{head}</head><article>{body}</article>")
    found = visit(browser, serve(tmp_path), "page.html", PHONE)
    assert [text for text in found if text.startswith(fault)], found
