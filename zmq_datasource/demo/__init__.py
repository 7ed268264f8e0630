"""The demo: a live feed through Spark and out again, with an account of every message.

``run`` leads through it, ``job`` is what a user's own program would look like, ``peers`` are
the programs at both ends of the sockets, ``session`` starts Spark, ``counts`` adds up what they all
say, ``verdict`` judges it, and ``display`` shows it.
"""

import zmq_datasource.spark  # noqa: F401 - which says what to install where there is no Spark
