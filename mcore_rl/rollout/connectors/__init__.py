"""Connectors to environments and evaluation suites of other libraries, which are optional packages."""
