"""What is wrong with a feed, or with a place for a log: a checklist.

``examine`` takes the facts about an endpoint: ``greeting`` reads what the peer says of itself, ``probe`` receives, and
``counting`` looks for numbers that count up. ``place`` takes the facts about a directory or a bucket. ``facts`` has
them as plain values, ``findings`` is the table of conditions on them, and ``report`` shows both as rows.

A finding rests on what was seen; where two causes look the same from outside, it names both. No finding advises to
delete or leave out messages. A stall, and taking from a PUSH, are felt by others, and happen only when they are asked
for. Every wait has an end.
"""

from zmq_datasource.workbench.doctor.examine import examine
from zmq_datasource.workbench.doctor.findings import exit_code
from zmq_datasource.workbench.doctor.place import examine_bucket, examine_directory
from zmq_datasource.workbench.doctor.report import as_text, report

__all__ = ["as_text", "examine", "examine_bucket", "examine_directory", "exit_code", "report"]
