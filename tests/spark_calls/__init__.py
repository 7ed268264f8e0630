"""Records the calls that Spark's micro-batch engine makes to a Python source, and when it writes its checkpoint.

* ``reader``: a source and a sink that write each call into a trace, and can fail one of them;
* ``scenarios``: what a query meets: data, a stop, a failure at one call, a restart;
* ``on_spark``: runs scenarios on the installed Spark;
* ``on_engine``: runs the same scenarios on the reduced engine of the weather machine;
* ``traces``: the text of a trace, without what depends on timing.

``tests/test_spark_calls.py`` compares the two.

This package imports little, because each Python process of Spark imports it.
"""
