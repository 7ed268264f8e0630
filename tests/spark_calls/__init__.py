"""Records the calls that Spark's micro-batch engine makes to a Python source, and when it writes its checkpoint.

* ``reader``: a source and a sink that write each call into a trace, and can hold or fail one of them;
* ``scenarios``: what a query meets: data, a stop, a failure, a kill at one call, a restart;
* ``on_spark``: runs scenarios on the installed Spark, with real kills of its processes;
* ``on_engine``: runs the same scenarios on the reduced engine of the weather machine;
* ``traces``: the text of a trace, without what depends on timing; the golden traces in ``tests/data/spark_calls``.

``tests/test_spark_calls.py`` compares both with the golden traces. The command records them again:

    python -m tests.spark_calls --write        # for the installed minor version of PySpark
    python -m tests.spark_calls --only plain   # show one scenario

This package imports little, because each Python process of Spark imports it.
"""
