"""Python imports this as it starts, where the weather machine has put it on the path.

So a process that a role starts has failpoints too, such as the server process of a proxy.
"""

import os

if page := os.environ.get("WEATHER_FAILPOINTS"):
    from pathlib import Path

    from tests.weather.failpoints import Page

    Page(Path(page)).install()
