"""The weather machine: draws a topology, a load and faults from a seed, runs them, and judges what came of it.

Everything is real but the weather: processes of their own, sockets, files, SIGKILL and SIGSTOP. The weather is
made from outside:

* ``middlebox``: a TCP middlebox that delays, throttles, cuts, goes half-open or swallows everything;
* ``faults``: what a process is told of its disk and its clock, through a page of memory that it shares;
* ``failpoints``: what a process meets at a named place, before or after a durable step, and how often it was there;
* ``machine``: who is killed, stopped or cut off, and when.

``topologies`` has what is run, with the model that judges it; ``engine`` is Spark's micro-batch engine reduced to its
order of steps, so that a run takes seconds and no JVM. One seed always draws the same run; how its processes interleave
is the machine's affair, so a seed that has failed is worth running several times.

    python -m tests.weather --seeds 200         # a line a seed, and for each failure the command that repeats it
    python -m tests.weather --first 17 --seeds 1 --keep /tmp/seed17
"""
