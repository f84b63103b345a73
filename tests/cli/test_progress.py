"""What is told on stderr while a campaign runs."""

from unsilent.cli.progress import make_observer


def test_counts_are_written_as_in_the_table(capsys):
    with make_observer(quiet=False, plain=True) as observer:
        observer.planned(1000, 12000)
    assert capsys.readouterr().err == "12,000 trials, 1,000 of them stored already\n"
