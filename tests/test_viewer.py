"""The live page in a real browser: headless Chromium, driven through its own protocol.

Without chromium and chromedriver these are skipped, unless REQUIRE_BROWSER is set, as it is in CI. The pictures in
docs/images: SCREENSHOTS=docs/images pytest tests/test_viewer.py -k fits
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from conftest import cli
from presage.store import read_shard

REPOSITORY = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and shutil.which("chromedriver")) and "REQUIRE_BROWSER" not in os.environ,
    reason="browser tests need chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """`presage watch` in a process of its own."""

    def __init__(self, run: Path, folder: Path, *options: str):
        self.port, self.log = free_port(), folder / "log.txt"
        self.url = f"http://127.0.0.1:{self.port}"
        words = [sys.executable, "-m", "presage", "watch", str(run), "--port", str(self.port), *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        with self.log.open("w") as log:  # a user's process: NiceGUI behaves otherwise where it sees pytest at work
            self.process = subprocess.Popen(words, stderr=log, stdout=log, cwd=folder, env=environment)
        try:
            until(lambda: self.url in self.log.read_text(), 60, self.log.read_text)
        except AssertionError:
            self.process.kill()
            raise

    def open_tabs(self) -> int:
        return int(re.findall(r"(\d+) open", self.log.read_text())[-1])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


def until(true, seconds: float = 20, why=lambda: ""):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = true()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing in {seconds} s: {why()}")


@pytest.fixture(scope="module")
def server(tiny_run, tmp_path_factory):
    example = ("results/agent", "--k", "50") if "SCREENSHOTS" in os.environ else ()
    run, *options = example or (tiny_run.path,)
    one = Server(REPOSITORY / run, tmp_path_factory.mktemp("watch"), "--game", "breakout", *options)
    yield one
    assert one.process.poll() is None, one.log.read_text()  # nothing that the tests did has stopped it
    assert one.stop() in (0, 130)
    assert "presage/viewer.py" not in one.log.read_text(), one.log.read_text()  # none of its own code has failed


def open_browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


@pytest.fixture(scope="module")
def browser():
    one = open_browser()
    yield one
    one.quit()


@pytest.fixture
def page(browser, server):
    return visit(browser, server)


def visit(browser, server) -> "Shown":
    browser.get(server.url)
    shown = Shown(browser)
    until(lambda: shown.step() is not None, 20, server.log.read_text)
    return shown


class Shown:
    """The page as a person sees and uses it."""

    def __init__(self, browser):
        self.browser = browser

    def facts(self) -> str:
        found = self.browser.find_elements(By.CSS_SELECTOR, ".facts")
        return found[0].text if found else ""  # it comes when the connection is there

    def step(self) -> int | None:
        found = re.search(r"step (\d+)", self.facts())
        return int(found[1]) if found else None

    def title(self) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, ".title").text

    def part(self, name: str) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, f".at-{name}").get_attribute("innerHTML")

    def reason(self) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, ".reason").text

    def press(self, name: str) -> None:
        self.browser.find_element(By.XPATH, f"//button[contains(., '{name}')]").click()

    def pause(self) -> int:
        """The step at which it stands still."""
        self.press("Pause")
        until(lambda: self.browser.find_elements(By.XPATH, "//button[contains(., 'Play')]"))
        until(lambda: self.step() == (time.sleep(0.4), self.step())[1])
        return self.step()

    def write(self, label: str, value: object) -> None:
        field = self.browser.find_element(By.CSS_SELECTOR, f"input[aria-label='{label}']")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE if value == "" else str(value))

    def choose(self, label: str, option: str) -> None:
        self.browser.find_element(By.XPATH, f"//label[contains(., '{label}')]").click()
        path = f"//div[@role='option'][normalize-space()='{option}']"
        WebDriverWait(self.browser, 10).until(lambda b: b.find_elements(By.XPATH, path))
        self.browser.find_element(By.XPATH, path).click()

    def stick(self) -> float:
        """Where the knob is, left to right."""
        return float(re.search(r'cx="([\d.]+)" cy="[\d.]+" r="15"', self.part("controls"))[1])


@needs_browser
def test_a_game_moves_and_curves_change(page):
    one = {name: page.part(name) for name in ("game", "died", "scored", "controls", "history")}
    step = page.step()
    until(lambda: page.step() > step + 5)
    for name, old in one.items():
        assert "<svg" in old
        until(lambda name=name, old=old: page.part(name) != old)
    assert page.title().lower() == "breakout"
    assert "the agent plays" in page.facts()


@needs_browser
def test_pause_stops_it_and_step_advances_by_one(page):
    step, picture = page.pause(), page.part("game")
    time.sleep(0.6)
    assert page.step() == step
    assert page.part("game") == picture
    for number in (1, 2, 3):
        page.press("Step")
        until(lambda number=number: page.step() == step + number)
    time.sleep(0.4)
    assert page.step() == step + 3
    page.press("Play")
    until(lambda: page.step() > step + 6)


@needs_browser
def test_the_selector_changes_the_game(page):
    page.choose("game", "toy")
    until(lambda: page.title().lower() == "toy")
    assert "never saw" not in page.facts()
    page.choose("game", "asterix")
    until(lambda: "never saw this game" in page.facts())
    until(lambda: page.step() > 3)


@needs_browser
def test_the_same_moment_through_an_early_and_a_late_network(page):
    step = page.pause()
    late, picture = page.part("died"), page.part("game")
    page.choose("network", "iteration 1")
    until(lambda: "network 1" in page.facts())
    assert page.step() == step
    assert page.part("game") == picture
    assert page.part("died") != late
    page.choose("network", "iteration 2")
    until(lambda: page.part("died") == late)


@needs_browser
def test_settings_act_at_once(page):
    step = page.pause()
    page.write("sequences", 33)
    until(lambda: "33 plans" in page.part("died"))
    page.write("P(died) under", "0.999")
    until(lambda: "33 of 33 plans have P(died) < 0.999" in page.reason())
    assert "limit" in page.part("died")
    page.write("P(died) under", "")
    until(lambda: "limit" not in page.part("died"))
    curve = page.part("died")
    page.browser.find_element(By.XPATH, "//div[@role='switch']").click()
    until(lambda: page.part("died") != curve)
    assert page.step() == step
    page.write("sequences", 1001)  # out of bounds: not taken
    time.sleep(2)
    assert "33 plans" in page.part("died")
    page.write("sequences", 3)
    until(lambda: "3 plans" in page.part("died"))
    page.write("seed", 5)
    until(lambda: page.step() == 0)


@needs_browser
def test_speed(page):
    page.write("steps a second", 2)
    time.sleep(0.5)
    first = page.step()
    time.sleep(2)
    assert 2 <= page.step() - first <= 6


@needs_browser
def test_a_person_takes_over_and_hands_back(page):
    until(lambda: page.step() > 35)  # an episode begins with up to 30 steps of doing nothing
    page.pause()
    page.press("Take over")
    until(lambda: "you play" in page.facts())
    assert page.stick() == 56
    for key, place in ((Keys.ARROW_LEFT, 36), (Keys.ARROW_RIGHT, 76)):
        ActionChains(page.browser).key_down(key).perform()
        page.press("Step")
        until(lambda place=place: page.stick() == place, 10, lambda: page.part("controls"))
        ActionChains(page.browser).key_up(key).perform()
    page.press("Step")  # a key that is up again
    until(lambda: page.stick() == 56)
    scrolled = page.browser.execute_script("return window.scrollY")
    ActionChains(page.browser).send_keys(Keys.ARROW_DOWN).perform()
    assert page.browser.execute_script("return window.scrollY") == scrolled
    page.press("Hand back")
    until(lambda: "the agent plays" in page.facts())


@needs_browser
def test_play_is_recorded(page, server):
    page.press("Record")
    step = page.step()
    until(lambda: page.step() > step + 9)
    page.press("Stop recording")
    folder = server.log.parent / "recordings"
    (file,) = until(lambda: list(folder.glob("breakout-*.safetensors")))
    until(lambda: "recorded in" in page.browser.find_element(By.TAG_NAME, "body").text)
    assert read_shard(file)["actions"].shape[1] >= 9


@needs_browser
def test_what_is_being_recorded_is_kept_at_ctrl_c(browser, tiny_run, tmp_path):
    server = Server(tiny_run.path, tmp_path, "--game", "toy")
    try:
        page = visit(browser, server)
        page.press("Record")
        step = page.step()
        until(lambda: page.step() > step + 5)
    finally:
        status = server.stop()
    assert status in (0, 130)
    (file,) = (tmp_path / "recordings").glob("toy-*.safetensors")
    assert read_shard(file)["actions"].shape[1] >= 5


@needs_browser
def test_two_browsers_play_two_games_and_a_closed_tab_frees_its_own(page, server):
    before = until(lambda: server.open_tabs() == 1 and 1)  # earlier tests' pages are gone
    other_browser = open_browser()
    try:
        other = visit(other_browser, server)
        assert server.open_tabs() == before + 1
        other.choose("game", "toy")
        until(lambda: other.title().lower() == "toy")
        assert page.title().lower() == "breakout"
        stood = other.pause()
        moved = page.step()
        until(lambda: page.step() > moved + 3)
        assert other.step() == stood
    finally:
        other_browser.quit()
    until(lambda: server.open_tabs() == before, 20, server.log.read_text)
    moved = page.step()
    until(lambda: page.step() != moved)


@needs_browser
def test_no_request_leaves_the_machine(browser, server):
    browser.get_log("performance")  # what other tests' pages asked for
    page = visit(browser, server)
    time.sleep(0.5)
    asked = set()
    for entry in page.browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.add(message["params"]["request"]["url"])
        elif message["method"] == "Network.webSocketCreated":
            asked.add(message["params"]["url"])
    ours = (server.url, server.url.replace("http", "ws"), "data:", "blob:")
    assert any(url.startswith("ws") for url in asked)
    assert [url for url in asked if not url.startswith(ours)] == []


@needs_browser
def test_hostile_messages_do_not_stop_it(page, server):
    page.browser.execute_script("""
      const send = (...words) => window.socket.emit(...words);
      const step = [...document.querySelectorAll("button")].find((one) => one.textContent.includes("Step"));
      send("event", null); send("event", "x"); send("event", {}); send("nonsense", {a: [1, 2]});
      send("event", {id: 10 ** 9, client_id: window.clientId, listener_id: "?", args: []});
      send("event", {id: Number(step.id.slice(1)), client_id: "someone else", listener_id: "?", args: {}});
      const field = document.querySelector("input[aria-label=sequences]").closest(".q-field");
      for (const value of [1e9, -1, NaN, null, "many", {}, [[]]])
        send("event", {id: Number(field.id.slice(1)), client_id: window.clientId, listener_id: "?", args: [value]});
      send("javascript_response", {client_id: window.clientId, request_id: "?", result: "<script>"});
    """)
    for data in (
        b"\x00\xff" * 500,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), 5) as raw:
            raw.sendall(data)
            raw.settimeout(0.5)
            with contextlib.suppress(OSError):
                raw.recv(100)
    for path in ("/../../etc/passwd", "/_nicegui/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"):
        try:
            body = urllib.request.urlopen(server.url + path, timeout=5).read()
        except urllib.error.HTTPError as error:
            body = error.read()
        assert b"root:" not in body
    moved = page.step()
    until(lambda: page.step() != moved, 20, server.log.read_text)
    page.pause()


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 860), (420, 1500)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_wide_and_narrow_windows_light_and_dark(page, width, height, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    until(lambda: page.step() > (160 if "SCREENSHOTS" in os.environ else 20), 60)
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width
    colour = page.browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
    assert (brightness > 200) == (scheme == "light")
    ink = page.browser.execute_script("return getComputedStyle(document.querySelector('.at-died text.faint')).fill")
    assert ink != colour
    if "SCREENSHOTS" in os.environ:
        name = f"watch-{'wide' if width > 1000 else 'narrow'}-{scheme}.png"
        page.browser.save_screenshot(str(REPOSITORY / os.environ["SCREENSHOTS"] / name))
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_is_refused(tiny_run, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli("watch", tiny_run.path, "--port", port)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "choose another --port" in done.stderr
    wrong = {
        "is no run": ("watch", tmp_path, "there is no run in"),
        "game": ("watch", tiny_run.path, "--game", "pongo", "did you mean pong"),
        "port": ("watch", tiny_run.path, "--port", 99999, "choose another --port"),
    }
    for *arguments, said in wrong.values():
        done = cli(*arguments)
        assert done.returncode == 2, done.stderr
        assert said.lower() in done.stderr.lower()
    done = cli("watch", tiny_run.path, code="sys.modules['nicegui'] = None")
    assert done.returncode == 2
    assert "presage[viewer]" in done.stderr
