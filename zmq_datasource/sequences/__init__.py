"""What publishers' own numbers tell: gaps, duplicates, late messages, restarts. Pure: no I/O, no clock.

A *counter* is what counts by itself: a publisher, a topic, an endpoint, or a combination. Of each
the tracker knows the next number to expect and the gaps that are still open. The rules, for a
number ``n`` of a counter that expects ``e``:

* ``n = e`` is next.
* ``n > e`` leaves a *gap*, ``e`` to ``n - 1``: lost, until it comes.
* ``n < e`` is a *restart* of the publisher, if such a publisher keeps its name when it restarts, and
  ``n`` is the first number of a counter, or came by a new connection (known where messages are
  counted by endpoint). A new *epoch* begins at the counter's first number, so that what came before
  ``n`` in it is a gap as well.
* A replay shows a restart too: the publisher has another message under a number that was seen, or
  none though it has messages. One that goes on from there is *ahead* of the live flow, which may bring
  the same messages once more; these *overlap*.
* ``n < e`` in an open gap is *late*: it fills its place there and is no longer lost.
* ``n < e`` by more than ``window`` is a restart too.
* Otherwise it is a *duplicate*, unless the tracker cannot know: before the first number that it saw,
  or below a gap that it had to forget. Then it is taken as late.
* A counter that wraps goes on from its last number to its first. "Less" is then the shorter way
  round, and the first number after any but the last is a restart.
* What was sent before the first number seen is not tracked, unless publishers are short-lived
  (``whole``). Then it is a gap.

A log with several partitions has a tracker for each. A counter *moves* when another partition receives its messages,
which happens where the number of receivers changes: the partition that hears it goes on from the newest of what all
partitions know of it, and the others give it up.

Memory is bounded: of counters, the one not heard for longest is forgotten first; of gaps, the
oldest. What was lost stays counted.

Modules: ``gaps`` is the table of gaps, ``runs`` finds where numbers go on by one, ``tracker`` the rules,
``records`` what it remembers and says, ``state`` what survives the process.
"""

from __future__ import annotations

from zmq_datasource.sequences.gaps import Gap, Key
from zmq_datasource.sequences.records import Sample, SequenceFindings, Totals
from zmq_datasource.sequences.runs import Keys, Run, runs_of
from zmq_datasource.sequences.tracker import SequenceTracker

__all__ = ["Gap", "Key", "Keys", "Run", "Sample", "SequenceFindings", "SequenceTracker", "Totals", "runs_of"]
