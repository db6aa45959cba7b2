"""A report that is open in a browser: the reader's actions, and the texts that the reader sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

SECONDS = 60
"""Waiting time for a change of the page, on a busy machine."""
SET = """
const [field, value] = arguments;
if (field.type === "checkbox") field.checked = value; else field.value = value;
for (const name of ["input", "change"]) field.dispatchEvent(new Event(name, { bubbles: true }));
"""


class ReportPage:
    """Page of a report. Actions wait until the page shows their result."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver
        self.wait(lambda: self.script("return document.body.dataset.ready") == "true")
        self.wait(lambda: self.found() != "")

    def wait(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, SECONDS, poll_frequency=0.02).until(lambda _: holds())

    def script(self, code: str, *arguments: object) -> Any:
        return self.driver.execute_script(code, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Return the text content of all elements, visible or not."""
        code = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        texts: list[str] = self.script(code, selector)
        return texts

    def found(self) -> str:
        """Return the line above the list of responses."""
        return self.texts("#found")[0]

    def click(self, selector: str, place: int = 0) -> None:
        element = self.all(selector)[place]
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def hover(self, selector: str, *, below_center: int = 0) -> None:
        """Move the mouse over an element. Units: pixels below its center."""
        element = self.all(selector)[0]
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.driver).move_to_element_with_offset(element, 0, below_center).perform()

    def set(self, selector: str, value: object) -> None:
        """Give a field a value, as an input of the reader does."""
        self.script(SET, self.all(selector)[0], value)

    def filter(self, **values: str | bool) -> str:
        """Reset all filters, then set the named ones. Returns the line above the list."""
        self._after_search(lambda: self.click("#filters button[type=reset]"))
        for name, value in values.items():
            self._after_search(lambda name=name, value=value: self.set(f"#filters [name={name}]", value))
        return self.found()

    def _after_search(self, act: Callable[[], object]) -> None:
        """Act, and wait until the list shows the result of the last search."""
        before = self.script("return list.request")
        act()
        self.wait(lambda: self.script("return list.request > arguments[0] && list.shown === list.request", before))

    def open_response(self, place: int = 0) -> WebElement:
        """Open a response of the list. Returns its body."""
        self.click("#list .item > summary", place)
        body = self.all("#list .item")[place].find_element(By.CSS_SELECTOR, ".body")
        self.wait(lambda: body.find_elements(By.CSS_SELECTOR, "[data-complete]"))
        return body

    def errors(self) -> list[str]:
        """Return the messages of the console since the last call."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]
