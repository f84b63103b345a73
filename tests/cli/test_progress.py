"""What is told on stderr while a campaign runs."""

from unsilent.cli.progress import make_observer


def test_counts_are_written_as_in_the_table(capsys):
    with make_observer(quiet=False, plain=True) as observer:
        observer.planned(1000, 12000)
    assert capsys.readouterr().err == "12,000 trials, 1,000 of them already stored\n"


def test_one_is_one_and_replicas_are_named(capsys):
    with make_observer(quiet=False, plain=True, noun="replica") as observer:
        observer.planned(0, 1)
        observer.trial(None)
        observer.planned(1, 30)
    with make_observer(quiet=True, plain=True, noun="replica") as observer:
        observer.planned(1, 30)
    assert capsys.readouterr().err == "1 replica\n30 replicas, 1 of them already stored\n"


def test_slow_trials_have_a_rate(capsys, monkeypatch):
    clock = iter((0.0, 0.0, 20.0))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with make_observer(quiet=False, plain=True) as observer:
        observer.planned(0, 3)
        observer.trial(None)
    assert capsys.readouterr().err == "3 trials\n1/3 trials, 0.0500/s, 40 s left\n"
