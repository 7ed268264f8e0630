"""The track record: each fault that was mended stays provable.

A patch in this directory brings one mended fault back. Its header names the fault, where it was mended, and the one
test or weather seed that goes red with it::

    Fault: a consumer that was lost beside a refused stranger was not counted, and its rows were not sent again.
    Mended: 8df6a3e
    Caught by: tests/sink/test_lost_connections.py::test_a_loss_is_noticed_beside_a_silent_connection

    diff --git a/zmq_datasource/sink/... b/zmq_datasource/sink/...

A seed is written as the arguments of ``python -m tests.weather``: ``weather --topology push-pull --first 17``, perhaps
with ``--failpoint NAME``. It draws other weather when its topology changes; then look for another seed. A header line
that begins with a space continues the line before it.

    python -m tests.track_record                # make chaos-proof: apply each patch in turn, and say which were caught
    python -m tests.track_record line-02 --keep # one of them, and the copy of the tree stays for a look

When code changes and a patch no longer applies, adapt the patch to the new code. Delete it only if the fault cannot
exist any more, and say why in the commit.

* ``record``: reads the patches, and finds the tests marked as failing for a known fault;
* ``proof``: copies the tree, applies a patch, runs the named test, and judges the result.
"""
