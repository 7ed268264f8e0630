"""What is wrong with a feed, found by receiving it with the source's own receiver.

The model:

* ``probe`` is a ``Receiver`` of ``source`` for one endpoint. It takes raw frames. ``framing`` reads the first of them
  with each framing of the package and chooses the one that fits; from then on the source's intake reads and tracks all
  messages. So a gap, a duplicate or a restart is what it would be in a query.
* ``examine`` makes the probes in their order: watch all endpoints, imitate a slow receiver, take nothing for a while
  (``stall``; ``hwm`` says which high-water mark explains what was held), compare with a receiver's log (``durable``).
* ``facts`` are the figures of that. ``findings`` is a pure function of them, one condition beside each sentence.
  ``report`` shows both.
* ``greeting`` says which socket is at the other end, before any handshake. ``place`` tries a directory or a bucket.

The rules:

* What cannot be known from outside is said to be so, with how to find out: no socket shows its peer's options, no queue
  its depth.
* A probe does as little as it can. A greeting is read on a connection that ends before the handshake, so its peer gives
  it no message. Watching is one more subscriber. A stall, and taking from a PUSH, are felt by others and happen only
  when they are asked for.
* Every wait has an end.
"""

from zmq_datasource.workbench.doctor.examine import Examination, Request, examine
from zmq_datasource.workbench.doctor.facts import (
    Consumed,
    Durable,
    Examined,
    Expected,
    Glance,
    Handshake,
    Numbers,
    Stalled,
    Traffic,
)
from zmq_datasource.workbench.doctor.findings import Finding, Severity, diagnose, exit_code
from zmq_datasource.workbench.doctor.place import Promise, examine_directory, examine_storage
from zmq_datasource.workbench.doctor.report import document, show

__all__ = [
    "Consumed",
    "Durable",
    "Examination",
    "Examined",
    "Expected",
    "Finding",
    "Glance",
    "Handshake",
    "Numbers",
    "Promise",
    "Request",
    "Severity",
    "Stalled",
    "Traffic",
    "diagnose",
    "document",
    "examine",
    "examine_directory",
    "examine_storage",
    "exit_code",
    "show",
]
