"""Headless Chromium of Debian, which shows what a reader of the report sees; no downloads."""

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

MISSING = "no Chromium here; on Debian: apt-get install chromium chromium-driver"


def found() -> bool:
    return all(shutil.which(name) for name in ("chromium", "chromedriver"))


class Page:
    """A page, open in the browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, path: Path) -> "Page":
        self.driver.get(path.resolve().as_uri())
        return self.drawn()

    def open_blank(self) -> None:
        """So that what comes next does not wait for the browser itself."""
        self.driver.get("data:text/html,<title>blank</title>")

    def drawn(self) -> "Page":
        """Wait for all charts."""
        WebDriverWait(self.driver, 30).until(
            lambda _: self.run("return document.documentElement.dataset.drawn") == "all"
        )
        return self

    def settle(self) -> "Page":
        """Wait until what has changed is drawn again."""
        self.driver.execute_async_script("setTimeout(arguments[0], 300)")
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def look(
        self, *, dark: bool = False, width: int = 1200, height: int = 900, media: str = ""
    ) -> "Page":
        """Set the size of the screen, the colour scheme and the medium."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": media, "features": [scheme]}
        )
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        return self

    def picture(self, whole: bool = False) -> bytes:
        """PNG, of what is in view or of the whole page."""
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot",
            {"captureBeyondViewport": whole, **(self._clip() if whole else {})},
        )
        return base64.b64decode(shot["data"])

    def _clip(self) -> dict[str, Any]:
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        }

    def printed(self) -> bytes:
        """PDF."""
        return base64.b64decode(self.driver.print_page())

    @property
    def complaints(self) -> list[str]:
        """Return the console's messages: errors, and what the page's policy has blocked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@contextmanager
def chromium() -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "hide-scrollbars",
        "force-device-scale-factor=1",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Page(driver)
    finally:
        driver.quit()
