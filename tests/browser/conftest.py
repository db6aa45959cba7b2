"""Chromium without a window, and reports opened in it. Without `make browser` the tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rl.observe.report.write import write_report
from tests.browser.report_page import ReportPage

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,1600")
"""Chromium's own sandbox does not work for root, and /dev/shm may be small in containers."""


@pytest.fixture(scope="module")
def open_report() -> Iterator[Callable[..., ReportPage]]:
    """Return a function that writes a report about run directories and opens it."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium: make browser")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))

    def open_page(*run_dirs: Path, width: int = 1300) -> ReportPage:
        driver.set_window_size(width, 1600)
        driver.get(write_report(run_dirs).absolute().as_uri())
        return ReportPage(driver)

    try:
        yield open_page
    finally:
        driver.quit()
