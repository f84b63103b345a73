"""The table of commands: the name of each command and where it is defined.

A name may have two words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unsilent.basics.lazy_module import load_named
from unsilent.command import MEASURE, Command

COMMANDS = {
    "pvf": "unsilent.cli.pvf:COMMAND",
    "training": "unsilent.studies.training.kind:TRAINING",
    "training-example": "unsilent.cli.training_example:COMMAND",
    "noise": "unsilent.studies.noise.kind:NOISE",
    "coverage": "unsilent.studies.coverage.kind:COVERAGE",
    "inference-coverage": "unsilent.studies.coverage.inference.kind:INFERENCE_COVERAGE",
    "checkpoint study": "unsilent.studies.checkpoint.kind:CHECKPOINT_STUDY",
    "plan": "unsilent.cli.plan:COMMAND",
    "profile": "unsilent.cli.profile:COMMAND",
    "run": "unsilent.cli.run:COMMAND",
    "watch": "unsilent.cli.watch:COMMAND",
    "incident show": "unsilent.incidents.showing:COMMAND",
    "incident replay": "unsilent.incidents.replaying:COMMAND",
    "triage": "unsilent.cli.triage:COMMAND",
    "triage query": "unsilent.cli.triage:QUERY",
    "triage train": "unsilent.cli.triage_train:COMMAND",
    "triage farm": "unsilent.cli.triage:FARM",
    "triage collect": "unsilent.cli.triage:COLLECT",
    "selftest": "unsilent.cli.selftest:COMMAND",
    "selftest record": "unsilent.cli.selftest:RECORD",
    "explain": "unsilent.cli.explain:COMMAND",
    "compare": "unsilent.cli.compare:COMMAND",
    "attack": "unsilent.cli.attack:COMMAND",
    "placement": "unsilent.cli.placement:COMMAND",
    "placement measure": "unsilent.cli.placement:MEASURE_COMMAND",
    "timeline": "unsilent.cli.timeline.diagnosing:COMMAND",
    "timeline optimise": "unsilent.cli.timeline.optimise:COMMAND",
    "timeline record": "unsilent.cli.timeline.record:COMMAND",
    "timeline hang": "unsilent.cli.timeline.hang:COMMAND",
    "checkpoint inspect": "unsilent.cli.checkpoint.reading:INSPECT",
    "checkpoint diff": "unsilent.cli.checkpoint.reading:DIFF",
    "checkpoint manifest": "unsilent.cli.checkpoint.reading:MANIFEST",
    "checkpoint verify": "unsilent.cli.checkpoint.reading:VERIFY",
    "checkpoint last-good": "unsilent.cli.checkpoint.reading:LAST_GOOD",
    "checkpoint corrupt": "unsilent.cli.checkpoint.editing:CORRUPT",
    "checkpoint undo": "unsilent.cli.checkpoint.editing:UNDO",
    "checkpoint replay": "unsilent.cli.checkpoint.editing:REPLAY",
    "canaries make": "unsilent.cli.canaries:MAKE",
    "canaries check": "unsilent.cli.canaries:CHECK",
    "report": "unsilent.cli.report:COMMAND",
    "diff": "unsilent.cli.diff:COMMAND",
    "replay": "unsilent.cli.replay:COMMAND",
    "replay-injection": "unsilent.cli.replay_injection:COMMAND",
    "status": "unsilent.cli.status:COMMAND",
    "export": "unsilent.cli.export:COMMAND",
    "merge": "unsilent.cli.merge:COMMAND",
    "workloads": "unsilent.cli.listing:WORKLOADS",
    "faults": "unsilent.cli.listing:FAULTS",
    "detectors": "unsilent.cli.listing:DETECTORS",
}  # fmt: skip
"""Commands of this package."""
PYTHON_FUNCTIONS = {
    "inject": "unsilent.inject(model, 'param:layer1.*', bit=30) injects one fault into a model, and undoes it.",
    "protect": "unsilent.protect(model, clean_batches) notices corrupted answers of a model, and repairs them.",
    "read_result": "unsilent.read_result('STORE.sqlite') reads a stored result: tables, figures, trials for pandas.",
}
"""Functions that are not commands, but that users look for among the commands."""


def find_command_name(words: Sequence[str]) -> str | None:
    """The longest command name with which the words begin; None if there is none."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in COMMANDS and len(words) >= count:
            return name
    from unsilent.studies.campaign_kinds import installed_kinds

    return words[0] if words and words[0] in installed_kinds() else None


def load_command(name: str) -> Command:
    """Import the command of this name, also from other packages; raises ``UsageError``."""
    if name in COMMANDS:
        loaded = load_named(COMMANDS[name])
    else:
        from unsilent.studies.campaign_kinds import installed_kinds, load_installed_kind

        loaded = load_installed_kind(installed_kinds()[name])
    if isinstance(loaded, Command):
        return loaded
    from unsilent.cli.campaign import CampaignVerb

    return CampaignVerb(loaded).command


def summaries(first_word: str = "") -> Iterator[tuple[str, str, str]]:
    """Group, name and first help line of each command.

    With ``first_word``, only two-word commands that begin with this word are listed.

    Studies of other packages are not imported.
    """
    for name in COMMANDS:
        if not first_word or name.startswith(f"{first_word} "):
            command = load_command(name)
            yield command.group, name, command.help.strip().partition("\n")[0]
    if not first_word:
        from unsilent.studies.campaign_kinds import installed_kinds

        for name, entry in installed_kinds().items():
            if name not in COMMANDS:
                yield MEASURE, name, f"Run the study of {entry.module}, which is not part of unsilent."
