"""The page at /: its files and data, and in headless Chromium a chat and the live view."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from llmkit.kv_cache.stats import KVMap
from llmkit_playground.live import MAX_CELLS, cells
from llmkit_playground.routes import _FILES as FILES

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no chromium and chromedriver (apt-get install chromium chromium-driver)"
)


def test_files_name_no_other_host_and_have_a_strict_policy(served):
    for path in FILES:
        response = served.call("GET", path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        hosts = set(re.findall(r"https?://[^/\"\s]+", response.text))
        assert hosts <= {"http://www.w3.org"}, hosts  # the namespace of SVG
        assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|innerHTML", response.text)
    assert "playground" not in served.call("GET", "/openapi.json").text


def test_the_data_needs_a_key_and_lives_without_an_engine(serve):
    served = serve(api_keys=("secret",))
    assert served.call("GET", "/").status_code == 200
    assert served.call("GET", "/playground/state").status_code == 401
    state = served.call("GET", "/playground/state", headers={"authorization": "Bearer secret"}).json()
    assert (state["model"], state["running"], state["blocks"], state["plugins"]) == ("models/tiny", 0, None, [])
    assert state["health"]["alive"] is True


def test_it_can_be_switched_off(serve):
    served = serve(playground=False)
    assert served.call("GET", "/").status_code == served.call("GET", "/playground/state").status_code == 404


def test_large_caches_are_shown_in_few_cells():
    few = cells(KVMap(block_size=16, states=bytes([0, 1, 2, 3])))
    assert (few["states"], few["per_cell"]) == ("0123", 1)
    many = cells(KVMap(block_size=16, states=bytes([2] * 3000 + [0] * 2000)))
    assert many["per_cell"] == 5
    assert many["states"] == "2" * 600 + "0" * 400
    assert len(many["states"]) <= MAX_CELLS
    assert many["counts"] == {"free": 2000, "cached": 0, "in_use": 3000, "shared": 0}
    assert cells(KVMap(block_size=16, states=b""))["states"] == ""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    def __init__(self, driver, url):
        self.driver = driver
        driver.get(url)

    def __getitem__(self, name):
        return self.driver.find_element("id", name)

    def until(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 40, poll_frequency=0.05).until(lambda _: condition())

    def show(self, width, height, scheme):
        """Make the window so large (in CSS pixels), and the user's taste light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def keep(self, name):
        """A screenshot, for those who want to look: LLMKIT_SCREENSHOTS is the folder."""
        if folder := os.environ.get("LLMKIT_SCREENSHOTS"):
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def say(self, text):
        self["prompt"].send_keys(text)
        self["send"].click()

    def answers(self):
        return [box.text for box in self.driver.find_elements("css selector", ".message.assistant .text")]

    def luminance(self, selector, field):
        script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        red, green, blue = re.findall(r"\d+", self.driver.execute_script(script, selector, field))[:3]
        parts = [int(c) / 255 for c in (red, green, blue)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(self, text, ground):
        one, other = self.luminance(text, "color"), self.luminance(ground, "backgroundColor")
        return (max(one, other) + 0.05) / (min(one, other) + 0.05)

    def check_quiet(self):
        assert self.driver.get_log("browser") == []


@pytest.fixture
def page(browser, live):
    shown = Page(browser, live.base_url)
    shown.show(1280, 860, "light")
    yield shown
    shown.check_quiet()
    browser.get("about:blank")  # nobody asks for the state any more


@needs_browser
@pytest.mark.model
def test_a_chat_streams_and_the_live_view_follows(page):
    page.until(lambda: page["health"].text.startswith("ready"))
    done = int(page["done"].text)
    page.driver.execute_script("document.getElementById('temperature').value = 0")
    page.driver.execute_script("document.getElementById('max_tokens').value = 60")
    page.say("What is the capital of France?")
    lengths = set()
    page.until(lambda: lengths.add(len(page.answers()[-1])) or (len(lengths) > 3 and page["usage"].text))
    assert "Paris" in page.answers()[-1]
    assert re.search(r"\d+ prompt tokens.* · \d+ answer tokens · first after \d+ ms", page["usage"].text)
    page.until(lambda: int(page["done"].text) == done + 1)
    assert "last " in page["step-note"].text
    assert page["kv-note"].text.startswith("0 of 399 held")
    assert int(page.driver.find_element("css selector", ".legend .s1 b").text) > 0  # cached
    assert {"scheduler", "attention", "executor"} <= {
        element.text for element in page.driver.find_elements("css selector", "#plugins .kind")
    }
    page.keep("chat-1280-light")
    page.say("And of Italy?")
    page.until(lambda: len(page.answers()) == 2 and page["usage"].text)
    assert re.search(r"\(\d+ cached\)", page["usage"].text)  # the conversation so far


@needs_browser
@pytest.mark.model
def test_an_answer_can_be_stopped(page):
    page.say("Tell me a very long story.")
    page.until(lambda: page.answers() and page.answers()[-1])
    page.until(lambda: page["running"].text == "1")
    page.keep("running-1280-light")
    page["stop"].click()
    page.until(lambda: page["usage"].text.endswith("stopped"))
    page.until(lambda: page["running"].text == "0")
    assert page["send"].is_displayed()


@needs_browser
@pytest.mark.model
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_can_be_read(page, width, scheme):
    page.show(width, 860, scheme)
    page.until(lambda: page["health"].text.startswith("ready"))
    page.driver.find_element("css selector", "#settings summary").click()
    widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    scroll, client = page.driver.execute_script(widths)
    assert scroll <= client <= width
    assert (page.luminance("body", "backgroundColor") < 0.1) == (scheme == "dark")
    for text, ground in (("body", "body"), (".note", "section"), ("dt", ".numbers div"), ("#send", "#send")):
        assert page.contrast(text, ground) >= 4.5, (text, ground)
    unnamed = page.driver.execute_script(
        "return [...document.querySelectorAll('input, textarea')].filter(e => !e.labels.length).map(e => e.id)"
    )
    assert unnamed == []
    page.keep(f"page-{width}-{scheme}")
