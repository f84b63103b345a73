"""The record that describes one kind of campaign, so that stores, exports and merges can read its trials."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, cast

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Request, check_option_fields
from unsilent.campaigns.campaign_run import CampaignRun, DryRun, run_and_analyse
from unsilent.campaigns.codec import Shape, row_codec
from unsilent.campaigns.opening import TEXT_BYTES
from unsilent.campaigns.options import AnalysisOptions, Budget, ExecutionOptions, ReportOptions
from unsilent.campaigns.runner import MakeRunner
from unsilent.campaigns.spec import B, PlainBaseline, R, S, Spec, TrialId, strata_of
from unsilent.campaigns.sqlite_file import APPLICATION_OWNERS
from unsilent.report.model import Report

if TYPE_CHECKING:
    from unsilent.campaigns.trial_replay import TrialReplay


def is_trial_of_targets(trial: TrialId, spec: Spec, targets: frozenset[str]) -> bool:
    """Whether a trial has one of the campaign's targets and one of its numbers of flips."""
    return trial.target in targets and trial.flips in spec.flips


def no_arrays(baseline: object, values: object) -> Mapping[str, Shape]:
    """An empty mapping of array shapes, for rows without arrays."""
    return {}


def do_nothing(*_: Any, **__: Any) -> Any:
    """A check that accepts everything."""


def count_budgeted_trials(store: Any, part: int = 1, parts: int = 1) -> int:
    """The number of trials in the largest budget, over all strata or for one part of ``--shard``."""
    spec, baseline = store.spec, store.baseline
    if spec.is_enumerated:
        sizes = [target.slots for target in baseline.targets]
    else:
        sizes = [int(store.largest_budget()[0])] * len(strata_of(spec, baseline))
    return sum(len(range(part - 1, size, parts)) for size in sizes)


def name_of_workload(store: Any) -> str:
    """The name of the workload that the trials of a store ran."""
    return str(getattr(store.baseline, "name", store.spec.workload))


@dataclass(frozen=True)
class Kind(Generic[S, B, R]):
    """The description of one kind of campaign: its options, its runner, its rows and its analysis.

    The content of a file is trusted only if the checks of the kind do not raise ``DamagedRecordError``.

    Attributes:
        name: Name of the kind, and of its command if ``command`` is empty.
        application_id: Application id of the SQLite files, four letters as a number.
        schema_version: Version of the stored data.
        spec, row, baseline: Classes of the records of the kind.
        runner: Class that runs the trials, or a `LazyFunction` that names it if it loads torch.
        check_spec, check_baseline, check_row (with the baseline): Functions that check values beyond their types.
        shapes: Function from the baseline and the scalars of a row to the shapes of its arrays.
        accepts_trial: Whether a campaign with this spec and these names of targets may hold a trial.
        is_planned_trial: Whether a trial is part of the campaign, and was not requested later.
        max_samples: Most samples that a trial may evaluate (`TrialId.sample_count`).
        max_cell_bytes: Most bytes of a cell.
        record_readers: Functions that read the text of further records, with spec and baseline, by the name of the record.
        shared_baseline_fields: Fields of the baseline that are equal in all stores of one campaign.
        analyse: Function that returns the result of a store, given fields of ``analysis_options``.
        report: Function that returns the report of a result, given fields of ``report_options``.
        compare: Function that returns the report on two stores, given fields of ``analysis_options`` and ``report_options``;
            ``None`` if stores cannot be compared.
        store_class: The class of open stores; ``None``: `Store` itself.
        builtin_values: Values that are part of this package, by field of the spec, so that a replay may use them (see
            `with_confirmed_files`).
        replay: Function that runs a trial again, given ``replay_choices``. ``None``: `unsilent.campaigns.replay.replay_trial`,
            for specs that name no files other than those handled by `with_confirmed_files`.
        count_planned_trials: Function that returns the number of trials in a store when its campaign is complete.
        subject: Function that returns the name of the subject of a store's trials.
        command: The words after ``unsilent`` that run a campaign; if empty, the name of the kind.
        command_help: The help of the command.
        budget, analysis_options, execution_options: Dataclasses of options besides the spec: number of trials, analysis of a
            store, and place where trials run.
        report_options: Dataclass of options for showing a result.
        further_option_classes: Further dataclasses of options.
        resolve_spec: Function that makes the spec from the request; ``None``: the spec is made from its fields alone.
        check_options: Function that raises ``UsageError`` for options that do not fit together, before anything is opened.
        late_fields: Fields of the spec that are known only when it runs, from options of the same name.
        run: Function that runs a campaign, including the work before and after its trials, and returns its result.
        dry_run: Functions that describe a campaign before it runs.
        example_arguments: Arguments of the command in the example of its help.
    """

    name: str
    application_id: int
    spec: type[S]
    row: type[R]
    runner: MakeRunner
    baseline: type[B] = PlainBaseline  # type: ignore[assignment]
    schema_version: int = 5
    check_spec: Callable[[S], None] = do_nothing
    check_baseline: Callable[[B], None] = do_nothing
    check_row: Callable[[R, B], None] = do_nothing
    shapes: Callable[[B, Mapping[str, Any]], Mapping[str, Shape]] = no_arrays
    accepts_trial: Callable[[TrialId, S, frozenset[str]], bool] = is_trial_of_targets
    is_planned_trial: Callable[[TrialId], bool] = lambda trial: True
    max_samples: int = 0
    max_cell_bytes: int = TEXT_BYTES
    record_readers: Mapping[str, Callable[[str, S, B], Any]] = field(default_factory=dict)
    shared_baseline_fields: tuple[str, ...] = ("targets",)
    analyse: Callable[..., Any] = do_nothing
    report: Callable[..., Report] = do_nothing
    compare: Callable[..., Report] | None = None
    store_class: Callable[..., Any] | None = None
    builtin_values: Mapping[str, Collection[str]] = field(default_factory=dict)
    replay: Callable[..., TrialReplay[Any]] | None = None
    replay_choices: tuple[str, ...] = ()
    count_planned_trials: Callable[[Any], int] = count_budgeted_trials
    subject: Callable[[Any], str] = name_of_workload
    command: str = ""
    command_help: str = ""
    budget: type = Budget
    analysis_options: type = AnalysisOptions
    report_options: type = ReportOptions
    further_option_classes: tuple[type, ...] = ()
    execution_options: type[ExecutionOptions] = ExecutionOptions
    resolve_spec: Callable[[Request], S] | None = None
    check_options: Callable[[Request, S], None] = do_nothing
    late_fields: tuple[str, ...] = ()
    run: Callable[[CampaignRun], Any] = run_and_analyse
    dry_run: DryRun = field(default_factory=DryRun)
    example_arguments: str = ""

    @property
    def command_words(self) -> str:
        """The words after ``unsilent`` that run a campaign of this kind."""
        return self.command or self.name

    @property
    def option_classes(self) -> tuple[type, ...]:
        """Dataclasses of all options of a campaign."""
        return self.spec, self.budget, self.analysis_options, *self.further_option_classes, self.execution_options

    @property
    def command_classes(self) -> tuple[type, ...]:
        """Dataclasses of the options that the stored command line contains, so that it repeats the campaign."""
        return self.budget, self.spec, self.analysis_options, self.report_options, *self.further_option_classes

    def command_line(self, request: Request) -> str:
        """The command line that repeats this request."""
        return request.command_line(self.command_words, *self.command_classes)

    def resolve_budget(self, request: Request) -> Budget:
        """The budget of the campaign; raises ``UsageError``."""
        budget: Budget = request[self.budget].resolve()
        return budget

    def checked_spec(self, request: Request) -> S:
        """The spec that the options describe; raises ``UsageError`` for any option that does not fit."""
        spec = self.resolve_spec(request) if self.resolve_spec else request[self.spec]
        self.resolve_budget(request)
        request[self.analysis_options]
        request[self.execution_options].check()
        self.check_options(request, spec)
        return spec

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for mistakes that would otherwise appear only when trials are stored."""
        verb = f"unsilent {self.command_words}"
        owner = APPLICATION_OWNERS.get(self.application_id, verb)
        if owner != verb:
            raise UsageError(
                f"the application id {self.application_id:#x} of kind {self.name} is that of {owner}; choose another"
            )
        if not 0 < self.application_id < 2**31:
            raise UsageError(
                f"the application id of kind {self.name} is {self.application_id:#x}; expected four letters as a number, "
                "above 0 and below 2**31"
            )
        if not self.row.__module__.startswith("unsilent."):
            self.check_records()  # a test checks those of this package: the check loads numpy, which would delay the help
        APPLICATION_OWNERS[self.application_id] = verb

    def check_records(self) -> None:
        """Raise ``UsageError`` for a row or options whose types cannot be stored or parsed."""
        arrays = [array.name for array in row_codec(cast("Any", self.row)).arrays]
        if arrays and self.shapes is no_arrays:
            raise UsageError(
                f"{self.row.__name__} has arrays ({', '.join(arrays)}), but kind {self.name} gives no shapes; add shapes="
            )
        for cls in {*self.option_classes, self.report_options}:
            check_option_fields(cls, needs_defaults=cls is not self.spec or self.resolve_spec is None)
