"""Named places before and after each durable step, at which a test can stop, delay or fail a process.

A module calls ``failpoints.reach("log.file.after_sync")`` through the module's attribute. The function does nothing.
A test replaces it in the process that it tests; no option and no environment variable of this package does so. A name
is ``<room>.<thing>.before_<step>`` or ``<room>.<thing>.after_<step>``.
"""


def reach(name: str) -> None:
    """Do nothing. The caller is at the place ``name``."""
