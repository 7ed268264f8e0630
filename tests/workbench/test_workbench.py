"""Experiments with high-water marks: real processes, and an account of every message."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from zmq_datasource.cli import main
from zmq_datasource.errors import WorkbenchError
from zmq_datasource.workbench import results
from zmq_datasource.workbench.experiment import Experiment, ExperimentResult, run
from zmq_datasource.workbench.plan import held, make_plan, measure_kernel, message_bytes
from zmq_datasource.workbench.results import plot, row, write_csv

PNG = b"\x89PNG\r\n\x1a\n"
# Four times as fast as it can be taken; small buffers, or the kernel's would hold all of it.
SLOW = Experiment(sndhwm=10, rcvhwm=10, messages=1000, size=1000, rate=4000, consume=0.001, buffers=4096)


# At its close a socket forgets up to 8 kB that it has taken from its queue and could not write
# (docs/zeromq-facts.md), whatever linger says.
FORGOTTEN = 9


def made_up(**experiment: object) -> ExperimentResult:
    return ExperimentResult(Experiment(**experiment), 900, 100, 0.25, 890, 10, 0.001, 0.02, 1 << 20, 0, 1.5)  # type: ignore[arg-type]


@pytest.mark.spark  # processes
@pytest.mark.parametrize("pattern", ["PUSH/PULL", "PUB/SUB"])
def test_a_sender_that_may_drop_counts_every_drop(pattern: str) -> None:
    found = run(SLOW._replace(pattern=pattern))  # type: ignore[arg-type]
    assert found.sent + found.dropped == 1000
    assert found.lost <= FORGOTTEN
    assert 0 < found.drop_rate < 1
    assert found.blocked == 0


@pytest.mark.spark
@pytest.mark.parametrize("pattern", ["PUSH/PULL", "PUB/SUB"])
def test_a_sender_that_waits_loses_nothing_and_says_how_long_it_waited(pattern: str) -> None:
    found = run(SLOW._replace(pattern=pattern, mode="block", messages=400))  # type: ignore[arg-type]
    assert (found.sent, found.dropped) == (400, 0)
    assert found.lost <= FORGOTTEN
    assert 0.1 < found.blocked < found.seconds + 0.1


@pytest.mark.spark
def test_a_pub_as_it_is_drops_in_silence() -> None:
    found = run(SLOW._replace(pattern="PUB/SUB", mode="silent"))
    assert (found.sent, found.dropped) == (1000, 0)
    assert found.lost == 1000 - found.received > 0


@pytest.mark.alone
@pytest.mark.spark
def test_a_larger_mark_drops_less_and_delivers_older_messages() -> None:
    small, large = (run(SLOW._replace(sndhwm=hwm, rcvhwm=hwm)) for hwm in (1, 200))
    assert large.dropped < small.dropped
    assert large.p50 > 2 * small.p50


@pytest.mark.alone
@pytest.mark.spark
def test_linger_0_gives_up_what_is_queued() -> None:
    kept = run(SLOW._replace(sndhwm=500, rcvhwm=1, messages=300, rate=0))
    given_up = run(SLOW._replace(sndhwm=500, rcvhwm=1, messages=300, rate=0, linger=0))
    assert kept.lost <= FORGOTTEN
    assert given_up.lost > 100


@pytest.mark.alone
@pytest.mark.spark
def test_a_stalled_chain_holds_about_both_marks() -> None:
    found = run(Experiment(sndhwm=300, rcvhwm=200, messages=3000, size=1000, stall=1.0, buffers=4096))
    assert 300 <= found.sent < 1000
    assert found.lost <= FORGOTTEN
    assert found.p50 > 0.5  # as old as the stall


def test_runs_are_written_as_csv_with_all_their_figures(tmp_path: Path) -> None:
    runs = [made_up(sndhwm=hwm, messages=1000) for hwm in (1, 10)]
    write_csv(runs, tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["sndhwm"] for r in rows] == ["1", "10"]
    assert rows[0] == {name: str(value) for name, value in row(runs[0]).items()}
    with pytest.raises(WorkbenchError, match="name another file with --csv"):
        write_csv(runs, tmp_path / "missing" / "runs.csv")


@pytest.mark.spark  # importing matplotlib takes its time
def test_runs_are_drawn(tmp_path: Path) -> None:
    runs = [made_up(sndhwm=hwm, rcvhwm=hwm, messages=1000) for hwm in (1, 10, 100)]
    runs += [replace(r, experiment=r.experiment._replace(mode="block", linger=0)) for r in runs]
    plot(runs, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(PNG)
    with pytest.raises(WorkbenchError, match=r"ends in \.png"):
        plot(runs, tmp_path / "runs.nonsense")


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "find_spec", lambda _: None)
    result = CliRunner().invoke(main, ["hwm", "--plot", str(tmp_path / "a.png")])
    assert result.exit_code == 2
    assert "pip install 'zmq_datasource[plot]'" in result.stderr
    monkeypatch.undo()
    for option in ("--plot", "--csv"):
        for path in (str(tmp_path / "nowhere" / "a.png"), "", "a" * 5000):
            result = CliRunner().invoke(main, ["hwm", option, path])
            assert result.exit_code == 2
            assert f"with {option}" in result.stderr
            assert len(result.stderr) < 700
    monkeypatch.setattr("os.access", lambda *_: False)
    result = CliRunner().invoke(main, ["hwm", "--csv", str(tmp_path / "a.csv")])
    assert result.exit_code == 2
    assert "permission denied; name another file with --csv" in result.stderr
    monkeypatch.undo()
    result = CliRunner().invoke(main, ["hwm", "--plot", str(tmp_path / "a.nonsense")])
    assert result.exit_code == 2
    assert "name a file that ends in .png, .svg, .pdf with --plot" in result.stderr


@pytest.mark.spark
def test_the_command_shows_a_row_a_run_and_writes_its_files(tmp_path: Path) -> None:
    arguments = ["hwm", "--messages", "100", "--rate", "0", "--consume", "0", "--sndhwm", "1,100"]
    arguments += ["--full", "noblock", "--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    shown = [line.split() for line in result.stdout.splitlines() if line.startswith("PUSH/PULL")]
    assert [(line[1], line[2], line[3]) for line in shown] == [
        ("noblock", "1", "1"),
        ("noblock", "100", "100"),
    ]
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 3
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--size", "8"], "16 bytes or more"),
        (["--sndhwm", "0,1"], "1 or more"),
        (["--sndhwm", "many"], "many"),
        (["--consume", "5"], "a number and a unit"),
        (["--full", "silent"], "for --pattern PUB/SUB"),
        (["--messages", "0"], "0"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(main, ["hwm", *arguments])
    assert result.exit_code == 2
    assert word in result.stderr


@pytest.mark.alone
@pytest.mark.spark
@pytest.mark.parametrize(("size", "marks"), [(100, [(300, 200)]), (1000, [(100, 100), (1000, 10)])])
def test_what_a_chain_holds_is_planned_within_a_tenth_of_what_is_measured(
    size: int, marks: list[tuple[int, int]]
) -> None:
    buffers = 8192
    kernel = measure_kernel(size, buffers)
    assert kernel > 0
    for sndhwm, rcvhwm in marks:
        found = run(
            Experiment(
                mode="fill",
                sndhwm=sndhwm,
                rcvhwm=rcvhwm,
                messages=6000,
                size=size,
                stall=1.2,
                linger=0,
                buffers=buffers,
            )
        )
        step = (sndhwm + 1) // 2  # what the system's buffers hold varies by some messages, and so tips it
        allowed = max(0.1 * found.sent, step)
        assert held(sndhwm, rcvhwm, kernel) == pytest.approx(found.sent, abs=allowed), (
            sndhwm,
            rcvhwm,
            kernel,
        )


def test_the_planned_mark_is_the_smallest_that_holds_the_stall() -> None:
    for rate, stall, hops, kernel in ((20_000, 2.0, 1, 0), (5000, 1.0, 2, 300), (1000, 60.0, 3, 40)):
        made = make_plan(rate, 200, stall, hops, kernel)
        assert made.held >= made.wanted == rate * stall
        # Half a queue is let in late, and the system's buffers come on top.
        assert 1.5 * hops * (made.hwm - 2) < made.wanted <= 1.5 * hops * made.hwm
        assert made.survives >= stall
        assert made.memory == 2 * hops * made.hwm * message_bytes(200)
        assert made.warnings == ()


@pytest.mark.alone
@pytest.mark.spark
def test_a_planned_mark_survives_the_stall_and_a_third_of_it_does_not() -> None:
    # Planned for half as long again: where the machine is busy, the stall that is made takes longer.
    plan = make_plan(rate=2000, size=1000, stall=0.75, hops=1, kernel=0)
    pause = Experiment(messages=1500, size=1000, rate=2000, consume=0.0001, stall=0.5, buffers=4096)
    assert run(pause._replace(sndhwm=plan.hwm, rcvhwm=plan.hwm)).dropped == 0
    assert run(pause._replace(sndhwm=plan.hwm // 3, rcvhwm=plan.hwm // 3)).dropped > 0


def test_a_plan_that_does_not_fit_says_what_does() -> None:
    made = make_plan(10_000, 1000, 60.0, 1, 0, memory=100 << 20)
    assert made.memory <= 100 << 20
    (warning,) = made.warnings
    assert f"it is {made.hwm:,}" in warning
    assert f"covers a pause of {made.survives:.2f} s" in warning


def test_a_plan_warns_where_a_mark_bounds_nothing_and_where_it_refuses_by_mistake() -> None:
    assert "marks bound little" in make_plan(1000, 100, 0.1, 1, 40_000).warnings[0]
    made = make_plan(1_000_000, 100, 0.001, 1, 0, memory=1000)
    assert any("refused by mistake" in warning for warning in made.warnings)
    assert make_plan(1_000_000, 100, 0.0001, 1, 0).hwm == 1200  # rate times 1.2 ms
    assert held(1001, 1001, 0) < held(1000, 1000, 0)  # which is why a planned mark is even


@pytest.mark.spark
def test_the_plan_is_shown_with_its_warnings() -> None:
    arguments = [
        "plan",
        "--rate",
        "1000",
        "--size",
        "1k",
        "--stall",
        "10s",
        "--buffers",
        "8k",
        "--memory",
        "1m",
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "10,000 messages: 1,000 a second for 10 s" in result.output
    assert "Warning: a pause of 10 s needs a high-water mark of" in result.output
