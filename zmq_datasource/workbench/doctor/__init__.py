"""What is wrong with a feed, found by receiving it with the source's own receiver.

The model:

* ``probe`` is a ``Receiver`` of ``source`` for one endpoint. It takes raw frames. ``framing`` reads the first messages
  with each framing of the package and chooses the one that fits. From then on the source's intake reads and tracks all
  messages. So a gap, a duplicate or a restart is what it would be in a query.
* ``examine`` makes the checks in this order: watch all endpoints, imitate a slow receiver, compare with a receiver's
  log, take nothing for a while (``stall``).
* ``facts`` has the figures of the checks. ``findings``, ``findings_numbers`` and ``findings_stall`` are pure functions
  of the figures, with one condition beside each sentence. ``report`` shows both.
* ``greeting`` says which socket is at the other end, before any handshake. ``place`` tries a directory or a bucket.

The rules:

* Where something cannot be known from outside, the report says so, and how to find out. For example, no socket shows
  the options of its peer, and no queue its length.
* A probe does as little as it can. A greeting is read on a connection that is closed before the handshake is done, so
  the peer sends no message over it. Watching is one more subscriber. A stall, and taking from a PUSH, are felt by
  others and happen only when they are asked for.
* Every wait has an end.
"""

from zmq_datasource.workbench.doctor.examine import Examination, ExaminationRequest, examine
from zmq_datasource.workbench.doctor.facts import Expected
from zmq_datasource.workbench.doctor.findings import Finding, exit_code
from zmq_datasource.workbench.doctor.place import examine_directory, examine_storage
from zmq_datasource.workbench.doctor.report import diagnose, document, show

__all__ = [
    "Examination",
    "ExaminationRequest",
    "Expected",
    "Finding",
    "diagnose",
    "document",
    "examine",
    "examine_directory",
    "examine_storage",
    "exit_code",
    "show",
]
