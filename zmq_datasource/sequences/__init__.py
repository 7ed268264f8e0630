"""Track publishers' sequence numbers: gaps, duplicates, late messages, restarts. Pure: no I/O, no clock.

A *counter* is one series of numbers: that of a publisher, a topic, an endpoint, or a combination of them. For each
counter the tracker has the next number that it expects, and the gaps that are open. These are the rules for a number
``n`` of a counter that expects ``e``:

* ``n = e``: the next message.
* ``n > e``: the numbers ``e`` to ``n - 1`` are a *gap*. They are lost until they arrive.
* ``n < e`` is a *restart* of the publisher, if publishers keep their names when they restart, and ``n`` is the first
  number of a counter or arrived on a new connection (connections are known where messages are counted by endpoint). A
  new *epoch* begins at the counter's first number, so the numbers below ``n`` in this epoch are a gap as well.
* ``n < e`` in a gap is *late*: it fills its place in the gap, and is no longer lost.
* ``n < e`` by more than ``window`` is a restart, too, if publishers keep their names.
* Any other ``n < e`` is a *duplicate*, unless the tracker cannot know: ``n`` may be below the first number that it
  received, or in or below a gap that it had to forget. Such a message counts as late.

And these are the rules beside them:

* Where missing messages are asked for (``replayed``), a replay may bring a number before the live flow does, also the
  first one. So a lower number is a restart only on a new connection, or if it is the first number and this connection
  has brought a live message before; otherwise it is late or a duplicate, and duplicates are left out.
* Messages sent before the first received number are not tracked, unless publishers are short-lived, or the user says
  where counters begin (``whole``). Then they are a gap.

Losses are told once (``Gap.lost``): a gap when it is found or, where it is asked for, when no replay
will fill it any more.

Memory is bounded. Of too many counters, the tracker forgets the one that was silent for longest; of too many gaps, the
oldest. The sums of lost messages keep what was forgotten.

Modules: ``runs`` finds where numbers go up by one, ``tracker`` has the rules, ``records`` the data that it keeps and
returns, among them the table of gaps, and ``state`` saves and restores a tracker.
"""

from __future__ import annotations

from zmq_datasource.sequences.records import Gap, Key, SequenceFindings, Totals
from zmq_datasource.sequences.runs import Keys, Run, runs_of
from zmq_datasource.sequences.tracker import SequenceTracker

__all__ = ["Gap", "Key", "Keys", "Run", "SequenceFindings", "SequenceTracker", "Totals", "runs_of"]
