"""Writes a picture of a run's report: `python scripts/screenshot_report.py RUN_DIR OUT.png` (needs `make browser`)."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.observe.report.write import write_report

SECONDS = 30
"""Time limit for the page to become ready."""
ONLY = """
for (const section of document.querySelectorAll("main > section")) {
  section.hidden = !arguments[0].includes(section.id);
}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path)
    parser.add_argument("out", metavar="OUT.png", type=Path)
    parser.add_argument("--size", metavar="WxH", default="1300x1700", help="pixels (default: %(default)s)")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--sections", default="overview,curves,step,responses", help="parts to show, by their ids")
    parser.add_argument("--open", action="store_true", help="open the first response")
    options = parser.parse_args(arguments)
    try:
        take(write_report(options.runs), options)
    except McoreRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(options.out)
    return 0


def take(page: Path, options: argparse.Namespace) -> None:
    """Open the page in Chromium and write the picture.

    Raises: ConfigError if Chromium is not installed, --size has another form, or the page does not become ready.
    """
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        raise ConfigError("pictures need Chromium and its driver: make browser")
    width, _, height = options.size.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise ConfigError(f"--size {options.size} must have the form 1300x1700")
    from selenium import webdriver

    settings = webdriver.ChromeOptions()
    settings.binary_location = chromium
    # Chromium's own sandbox does not work for root.
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}"):
        settings.add_argument(option)
    driver = webdriver.Chrome(settings, webdriver.ChromeService(chromedriver))
    try:
        theme = {"name": "prefers-color-scheme", "value": options.theme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        driver.get(page.absolute().as_uri())
        deadline = time.monotonic() + SECONDS
        while not driver.execute_script("return document.body.dataset.ready"):
            if time.monotonic() > deadline:
                raise ConfigError(f"{page} is not ready after {SECONDS} s; open it in a browser to see its errors")
            time.sleep(0.05)
        driver.execute_script(ONLY, options.sections.split(","))
        if options.open:
            driver.execute_script("document.querySelector('#list .item').open = true")
        time.sleep(1)  # charts are drawn when they become visible
        driver.save_screenshot(str(options.out))
    finally:
        driver.quit()


if __name__ == "__main__":
    sys.exit(main())
